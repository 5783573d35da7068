"""What phases/optimizer.py does to Megatron's optimizers, checked inside a torchrun world of two processes.

    torchrun --nproc-per-node 2 tests/parallel/optimizer_world.py RESULTS

Each rank writes RESULTS/rank_N.json: {form: {check: did it hold}}. Every check runs on every rank, whatever it finds,
so that no rank waits for another.
"""

import copy
import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from megatron_mlmclm import platform

platform.prepare()

import torch  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core import optimizer as optimizer_module  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

from megatron_mlmclm.attention import Pattern  # noqa: E402
from megatron_mlmclm.model.build import layer_spec  # noqa: E402
from megatron_mlmclm.phases.optimizer import (  # noqa: E402
    Freezer,
    main_params,
    reset_optimizer,
    set_hyperparameters,
    units_of,
)

VOCAB_SIZE, SEQUENCE = 128, 16
BETAS, EPS = (0.9, 0.95), 1e-8
ALL = frozenset(["embedding", "head", "final_norm", "layers.0", "layers.1"])


@dataclass
class Form:
    """Which of Megatron's optimizers: weights in bf16, sharded, around torch's AdamW instead of the CPU's FusedAdam."""

    bf16: bool
    sharded: bool
    torch_adam: bool = False
    tied: bool = False
    overlap: bool = False  # gradients are reduced while backward goes on


FORMS = {
    "plain-fp32": Form(bf16=False, sharded=False),
    "plain-bf16": Form(bf16=True, sharded=False),
    "distributed-fp32": Form(bf16=False, sharded=True),
    "distributed-bf16": Form(bf16=True, sharded=True),
    "plain-fp32-torch": Form(bf16=False, sharded=False, torch_adam=True),
    "plain-bf16-torch": Form(bf16=True, sharded=False, torch_adam=True),
    "distributed-bf16-torch": Form(bf16=True, sharded=True, torch_adam=True),
    "distributed-bf16-tied": Form(bf16=True, sharded=True, tied=True),
    "distributed-bf16-overlap": Form(bf16=True, sharded=True, overlap=True),
}
# Three of them for time's sake. Upstream cannot load the distributed optimizer around torch's AdamW at all: its
# state_dict() asserts a step count, which a new optimizer does not have.
CHECKPOINTED = ["plain-bf16", "distributed-bf16", "plain-fp32-torch"]


@dataclass
class Trainer:
    """A small model with its optimizer, trained on batches that differ by step and rank."""

    form: Form
    freezer: Freezer | None = None
    step: int = 0
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = transformer_config(self.form)
        model = gpt(config, tied=self.form.tied)
        chunk = Float16Module(config, model) if self.form.bf16 else model
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=self.form.sharded,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.form.overlap,
            bucket_size=8000 if self.form.overlap else None,
        )
        self.chunk = DistributedDataParallel(config, ddp, chunk)
        self.chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(optimizer_config(self.form), [self.chunk])
        self.part = self.optimizer.chained_optimizers[0]
        self.units = units_of(self.chunk)
        if self.freezer:
            self.freezer.attach(self.optimizer, [self.chunk])

    def backward(self) -> None:
        """Gradients of the next batch, finalized as the run does it."""
        generator = torch.Generator().manual_seed(1000 * self.step + parallel_state.get_data_parallel_rank())
        tokens = torch.randint(VOCAB_SIZE, (2, SEQUENCE), generator=generator)
        labels = torch.randint(VOCAB_SIZE, (2, SEQUENCE), generator=generator)
        positions = torch.arange(SEQUENCE).expand_as(tokens)
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.chunk(tokens, positions, None, labels=labels).float().sum().backward()
        finalize = self.freezer.finalize if self.freezer else finalize_model_grads
        finalize([self.chunk], torch.tensor(tokens.numel()))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.norms.append(float(self.optimizer.step()[1]))
            self.step += 1

    def norm_of(self, units: frozenset[str]) -> float:
        """The norm of these units' finalized gradients, read from the model's `main_grad`."""
        total = torch.zeros((), dtype=torch.float64)
        for p, _ in main_params(self.part):
            if self.units[p] in units:
                grad = p.main_grad.view(-1)
                if self.form.sharded:
                    shard = self.part._get_model_param_range_map(p)["param"]
                    grad = grad[shard.start : shard.end]
                total += grad.double().norm() ** 2
        if self.form.sharded:
            torch.distributed.all_reduce(total)
        return float(total.sqrt())

    def tensors(self, units: frozenset[str] = ALL) -> dict[str, torch.Tensor]:
        """Copies of model weights, main weights and moments of these units on this rank, by name."""
        names = {p: name for name, p in self.chunk.named_parameters()}
        found = {f"weight {names[p]}": p for p in names if self.units[p] in units}
        for p, main in main_params(self.part):
            if self.units[p] in units:
                state = self.part.optimizer.state[main]
                found |= {f"main {names[p]}": main, **{f"{m} {names[p]}": state[m] for m in ("exp_avg", "exp_avg_sq")}}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def sharded_state(self, is_loading: bool = False) -> dict:
        """Model and optimizer, in the form in which Megatron's training saves them by default."""
        model = self.chunk.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"} if self.form.sharded else {}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}

    def counts(self) -> list[int]:
        """Every step count there is, on any rank."""
        inner = self.part.optimizer
        keepers = [*(g for g in inner.param_groups if g["params"]), *inner.state.values()]
        local = [int(keeper["step"]) for keeper in keepers if "step" in keeper]
        everyone: list[list[int]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(everyone, local)
        return [count for counts in everyone for count in counts]


def transformer_config(form: Form, layers: int = 2, **parallel: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        calculate_per_token_loss=True,
        transformer_impl="local",
        bf16=form.bf16,
        params_dtype=torch.bfloat16 if form.bf16 else torch.float32,
        pipeline_dtype=torch.float32,
        **parallel,
    )


def gpt(config: TransformerConfig, *, tied: bool, **stage) -> GPTModel:
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    spec = layer_spec(SimpleNamespace(transformer=config), stage.get("vp_stage"), pattern=Pattern("causal"))
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": tied}
    return GPTModel(config, spec, VOCAB_SIZE, SEQUENCE, **options, **stage)


def optimizer_config(form: Form) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-2,
        weight_decay=0.1,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        clip_grad=0.5,
        bf16=form.bf16,
        params_dtype=torch.bfloat16 if form.bf16 else torch.float32,
        use_distributed_optimizer=form.sharded,
    )


@contextmanager
def adam_of(form: Form):
    """Megatron around torch's AdamW, as on a GPU with neither Transformer Engine nor Apex."""
    if not form.torch_adam:
        yield
        return
    places = [(optimizer_module, "Adam"), (distrib_optimizer, "Adam")]
    flags = {(optimizer_module, "USING_PYTORCH_OPTIMIZER"): True, (distrib_optimizer, "HAVE_APEX_OR_TE"): False}
    new = {**dict.fromkeys(places, torch.optim.AdamW), **flags}
    old = {(module, name): getattr(module, name) for module, name in new}
    try:
        for (module, name), value in new.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in old.items():
            setattr(module, name, value)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def all_differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and not any(torch.equal(one[name], other[name]) for name in one)


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-5 * abs(b)


def check_reset(form: Form) -> dict[str, bool]:
    used, fresh = Trainer(form), Trainer(form)
    used.train(3)
    before = used.tensors()
    reset_optimizer(used.optimizer)
    set_hyperparameters(used.optimizer, betas=(0.8, 0.9), eps=1e-6)
    set_hyperparameters(fresh.optimizer, betas=(0.8, 0.9), eps=1e-6)
    after = used.tensors()
    kept = {name for name in before if name.startswith(("weight", "main"))}
    with torch.no_grad():
        for (p, main), (p_used, main_used) in zip(main_params(fresh.part), main_params(used.part), strict=True):
            main.copy_(main_used)
            p.copy_(p_used)
        for p, p_used in zip(fresh.chunk.parameters(), used.chunk.parameters(), strict=True):
            p.copy_(p_used)
    fresh.step = used.step
    counts = used.counts()
    used.train(1)
    fresh.train(1)
    once = same(used.tensors(), fresh.tensors())
    used.train(2)
    fresh.train(2)
    return {
        "a reset keeps weights and main weights": all(torch.equal(before[n], after[n]) for n in kept),
        "a reset zeroes moments": all(not after[n].any() for n in after if n not in kept),
        "a reset zeroes the step count": set(counts) == {0},
        "the next step is a new optimizer's": once and used.norms[3] == fresh.norms[0],
        "so are those after it": same(used.tensors(), fresh.tensors()) and used.counts() == fresh.counts(),
        "hyperparameters are the recipe's": all(
            g["betas"] == (0.8, 0.9) and g["eps"] == 1e-6 for g in used.optimizer.param_groups
        ),
    }


def check_freezing(form: Form) -> dict[str, bool]:
    frozen = frozenset(["embedding", "layers.1"])
    rest = ALL - frozen
    plain, trainer = Trainer(form), Trainer(form, Freezer())
    plain.train(2)
    trainer.train(2)
    identical = same(plain.tensors(), trainer.tensors()) and plain.norms == trainer.norms
    before = trainer.tensors(frozen), trainer.tensors(rest)
    trainer.freezer.freeze(frozen)
    plain.backward()  # on the same weights, so with the same gradients
    norm, full = plain.norm_of(rest), plain.norm_of(ALL)
    trainer.train(3)
    after = trainer.tensors(frozen), trainer.tensors(rest)
    counts = trainer.counts()
    trainer.freezer.freeze(())
    thawed = trainer.tensors(frozen)
    trainer.train(1)
    found = {
        "nothing frozen: as without a Freezer": identical,
        "frozen weights and moments stand still": same(before[0], after[0]),
        "all others move": all_differ(before[1], after[1]),
        "the gradient norm is of the others": close(trainer.norms[2], norm) and not close(norm, full),
        "one step count for all": set(counts) == {5},
        "thawed moments go on from the old ones": moments_follow(trainer, thawed, frozen),
        "thawed weights move": all_differ(
            *({n: t for n, t in ts.items() if n.startswith("main")} for ts in (thawed, trainer.tensors(frozen)))
        ),
    }
    if not form.sharded:  # the same on both ranks, as every weight must be
        found["ranks agree"] = ranks_agree(trainer)
    return found


def moments_follow(trainer: Trainer, old: dict[str, torch.Tensor], units: frozenset[str]) -> bool:
    """Whether the last update of these units' moments started from the old ones; Adam's gradients are still there."""
    names = {p: name for name, p in trainer.chunk.named_parameters()}
    for p, main in main_params(trainer.part):
        if trainer.units[p] not in units:
            continue
        state = trainer.part.optimizer.state[main]
        for moment, beta, power in (("exp_avg", BETAS[0], 1), ("exp_avg_sq", BETAS[1], 2)):
            expected = beta * old[f"{moment} {names[p]}"] + (1 - beta) * main.grad**power
            if (state[moment] - expected).abs().max() > 1e-6 * expected.abs().max():
                return False
    return True


def ranks_agree(trainer: Trainer) -> bool:
    for tensor in trainer.tensors().values():
        other = tensor.float().clone()
        torch.distributed.broadcast(other, src=0)
        if not torch.equal(other, tensor.float()):
            return False
    return True


def check_frozen_from_the_start(form: Form) -> dict[str, bool]:
    """All but one unit: no norm weight, and with shards nothing at all on one of the ranks, has a gradient."""
    trainer = Trainer(form, Freezer())
    trainer.freezer.freeze(ALL - {"head"} if not form.tied else ALL - {"layers.0"})
    trainer.train(2)
    inner = trainer.part.optimizer
    has_moments = all("exp_avg" in inner.state[main] for _, main in main_params(trainer.part))
    trainer.part.state_dict()  # raises where step counts differ
    counts = trainer.counts()
    trainer.freezer.freeze(())
    trainer.train(1)
    return {
        "frozen from the start: moments for a checkpoint": has_moments,
        "frozen from the start: one step count for all": set(counts) == {2} and set(trainer.counts()) == {3},
    }


def check_checkpoint(form: Form) -> dict[str, bool]:
    """A run that froze from its first step is saved, loaded without a Freezer, and goes on as it would have."""
    trainer, loaded = Trainer(form, Freezer()), Trainer(form)
    trainer.freezer.freeze(ALL - {"final_norm"})
    trainer.train(2)
    folder = Path(sys.argv[1], "checkpoint")
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(trainer.sharded_state(), str(folder))
    state = dist_checkpointing.load(loaded.sharded_state(is_loading=True), str(folder))
    unwrap_model(loaded.chunk).load_state_dict(state["model"], strict=False)  # without TE's extra states
    loaded.optimizer.load_state_dict(state["optimizer"])
    loaded.step = trainer.step
    restored = same(trainer.tensors(), loaded.tensors())
    trainer.freezer.freeze(())
    trainer.train(1)
    loaded.train(1)
    return {
        "a frozen run's checkpoint loads": restored,
        "and goes on as the run": same(trainer.tensors(), loaded.tensors()) and set(loaded.counts()) == {3},
    }


def check_chain(form: Form) -> dict[str, bool]:
    """Two optimizers in one chain, as Megatron makes for virtual pipeline chunks or experts."""
    freezer = Freezer()
    both = [Trainer(form), Trainer(form)]
    for trainer in both:
        trainer.train(1)
        trainer.freezer = freezer
    chain = ChainedOptimizer([trainer.part for trainer in both])
    freezer.attach(chain, [trainer.chunk for trainer in both])
    freezer.freeze({"layers.0"})
    before = [trainer.tensors(frozenset({"layers.0"})) for trainer in both]
    for trainer in both:
        trainer.train(1)
    after = [trainer.tensors(frozenset({"layers.0"})) for trainer in both]
    reset_optimizer(chain)
    moments = [t for trainer in both for n, t in trainer.tensors().items() if n.startswith("exp_avg")]
    return {
        "a chain is frozen": all(map(same, before, after)),
        "a chain is reset": not any(moment.any() for moment in moments),
    }


def check_names(form: Form) -> dict[str, bool]:
    freezer = Freezer()
    trainer = Trainer(form, freezer)
    refused = {}
    for name in ("layers.2", "decoder"):
        try:
            freezer.freeze([name])
        except ValueError as error:
            refused[name] = name in str(error)
    freezer.freeze(["head"])
    heads = {name for name, p in trainer.chunk.named_parameters() if trainer.units[p] in freezer.frozen}
    copied = copy.deepcopy({"finalize_model_grads_func": freezer.finalize})["finalize_model_grads_func"]
    weight = "embedding.word_embeddings.weight" if form.tied else "output_layer.weight"
    return {
        "every parameter has a unit": set(trainer.units) == set(trainer.chunk.parameters()),
        "a copied config keeps its Freezer": copied.__self__ is freezer,
        "unknown units are refused": refused == {"layers.2": True, "decoder": True},
        "the head is the head": [name.removeprefix("module.").removeprefix("module.") for name in heads] == [weight],
    }


def check_stages() -> dict[str, bool]:
    """Two pipeline stages of two virtual chunks each, tied: global layer numbers, and the head's copy an embedding."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    parallel = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = transformer_config(Form(bf16=False, sharded=False), layers=4, **parallel)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    found = {}
    for tied in (False, True):
        units = []
        for stage in (0, 1):
            first, last = (rank, stage) == (0, 0), (rank, stage) == (1, 1)
            chunk = gpt(config, tied=tied, pre_process=first, post_process=last, vp_stage=stage)
            units.append(set(units_of(chunk).values()))
        head = "embedding" if tied else "head"
        expected = {
            0: [{"embedding", "layers.0"}, {"layers.2"}],
            1: [{"layers.1"}, {"layers.3", "final_norm", head}],
        }
        found[f"layers are numbered over the whole model, {tied=}"] = units == expected[rank]
    parallel_state.destroy_model_parallel()
    return found


def main() -> None:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    results = {}
    for name, form in FORMS.items():
        with adam_of(form):
            checks = [check_reset, check_freezing, check_frozen_from_the_start, check_chain, check_names]
            if name in CHECKPOINTED:
                checks.append(check_checkpoint)
            results[name] = {label: held for check in checks for label, held in check(form).items()}
    parallel_state.destroy_model_parallel()
    results["pipeline"] = check_stages()
    Path(sys.argv[1], f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
