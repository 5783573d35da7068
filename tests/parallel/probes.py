"""What the parallel tests look at inside a running world, and how megatron is made to forget a run."""

import contextlib
import gc
import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import get_args, global_vars, training

from megatron_mlmclm.loop import run as run_module
from megatron_mlmclm.loop.forward import ForwardStep
from megatron_mlmclm.model import masked_loss, predicted_logits, select_rows
from megatron_mlmclm.model.init import sharded_tensors
from tests.parallel import attention_probe
from tests.parallel.fixed import CHANGED_POSITION, LAST_STEP, VOCAB_SIZE, documents_of, fixed_sequences


@contextlib.contextmanager
def installed(names: list[str], steps: list[int], request, rank: int) -> Iterator[None]:
    """Hang the named probes on the next run, and take everything off again."""
    train_step, build, forward_step = training.train_step, run_module.model_config, run_module.ForwardStep
    folder = Path(request.recipe.output)

    def with_probes(args, **kwargs):
        config = build(args, **kwargs)
        if "gradients" in names:
            inner = config.transformer.finalize_model_grads_func
            config.transformer.finalize_model_grads_func = _saving_gradients(inner, steps, folder, rank)
        return config

    run_module.model_config = with_probes
    if "batches" in names:
        run_module.ForwardStep = partial(_Recording, folder / "batches.txt")
    if "documents" in names:
        run_module.ForwardStep = _WithDocuments
    if "patterns" in names:
        _after_each_step(lambda step, chunk: attention_probe.save(step, chunk, folder, rank))
    if "perturbation" in names:
        _after_each_step(lambda step, chunk: _save_first_moved(step, chunk, request.recipe, folder, rank))
    if "logits" in names:
        _after_each_step(lambda step, chunk: _save_logits(step, chunk, request.recipe, folder, rank))
    if "head" in names:
        _after_each_step(lambda step, chunk: _save_head_errors(step, chunk, folder, rank))
    try:
        yield
    finally:
        training.train_step, run_module.model_config, run_module.ForwardStep = train_step, build, forward_step


def reset_megatron() -> None:
    """Everything megatron keeps in module globals about the run that just ended."""
    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    gc.collect()


class _Recording(ForwardStep):
    """Appends, for every training sample this rank is given, the hash of what the model reads and predicts."""

    def __init__(self, file: Path, *args) -> None:
        super().__init__(*args)
        self._file = file

    def __call__(self, data_iterator, model):
        return super().__call__(self._recorded(data_iterator) if model.training else data_iterator, model)

    def _recorded(self, data_iterator):
        batch = next(data_iterator)
        names = ("inputs", "labels", "predicted", "weight", "prefix")
        with self._file.open("a") as file:
            for place in range(len(batch["view"])):
                parts = b"".join(batch[name][place].numpy().tobytes() for name in names)
                file.write(hashlib.sha256(parts).hexdigest() + "\n")
        yield batch


class _WithDocuments(ForwardStep):
    """Every sequence is cut into documents, and some end in padding, by what they hold."""

    def __call__(self, data_iterator, model):
        return super().__call__(self._cut(data_iterator), model)

    def _cut(self, data_iterator):
        batch = next(data_iterator)
        documents = documents_of(batch["inputs"])
        yield batch | {"documents": documents, "predicted": batch["predicted"] & (documents >= 0)}


def _saving_gradients(inner, steps: list[int], folder: Path, rank: int):
    """Saves this rank's shards of every full gradient, and of the weights it was taken at, by global name and offset.

    `steps` count from 1 over the whole run.
    """

    def finalize(model, num_tokens=None, *args, **kwargs):
        inner(model, num_tokens, *args, **kwargs)
        step = get_args().curr_iteration + 1
        if step in steps:
            chunks = unwrap_model(model)
            weights = [shard for chunk in chunks for shard in _shards(chunk)]
            torch.save(weights, folder / f"weights_{step}_{rank}.pt")
            gradients = [shard for chunk in chunks for shard in _gradients_as_shards(chunk)]
            torch.save(gradients, folder / f"gradients_{step}_{rank}.pt")

    return finalize


def _shards(chunk) -> list[tuple]:
    """(name with layer index, offset, global shape, data) of each shard of the weights."""
    shards = []
    for t in sharded_tensors(chunk):
        lead = t.prepend_axis_num
        name = (t.key, *t.global_offset[:lead])
        shards.append((name, t.global_offset[lead:], t.global_shape[lead:], t.data.clone()))
    return shards


def _gradients_as_shards(chunk) -> list[tuple]:
    """As `_shards`, as if gradients were the weights."""
    weights = {name: p.data for name, p in chunk.named_parameters()}
    for p in chunk.parameters():
        p.data = p.main_grad.clone()
    try:
        return _shards(chunk)
    finally:
        for name, p in chunk.named_parameters():
            p.data = weights[name]


def _after_each_step(look) -> None:
    """Call `look(step, model chunk)` after each training step."""
    inner = training.train_step

    def train_step(forward_step_func, data_iterator, model, *rest, iteration, **kwargs):
        result = inner(forward_step_func, data_iterator, model, *rest, iteration=iteration, **kwargs)
        model[0].eval()
        with torch.no_grad():
            look(iteration + 1, model[0])
        model[0].train()
        return result

    training.train_step = train_step


def _save_first_moved(step: int, chunk, recipe, folder: Path, rank: int) -> None:
    """Saves {step: the first position whose output moves when token CHANGED_POSITION changes}."""
    sequences = fixed_sequences(recipe.model.seq_length)
    changed = sequences.clone()
    changed[:, CHANGED_POSITION] += 1
    positions = torch.arange(sequences.shape[1]).expand_as(sequences)
    hidden = {"output_processor": lambda hidden_states, **_: hidden_states}
    moved = (chunk(changed, positions, None, **hidden) - chunk(sequences, positions, None, **hidden)).abs().sum(-1)
    if recipe.parallel.sequence_parallel:  # this rank has its own positions only
        moved = torch.cat(_gathered(moved))
    file = folder / f"perturbation_{rank}.pt"
    found = torch.load(file) if file.exists() else {}
    torch.save({**found, step: int(moved.amax(1).gt(0).nonzero()[0])}, file)


def _save_logits(step: int, chunk, recipe, folder: Path, rank: int) -> None:
    """Saves the logits of the fixed sequences after the last step, [2, s, padded vocabulary]."""
    if step != LAST_STEP:
        return
    sequences = fixed_sequences(recipe.model.seq_length)
    positions = torch.arange(sequences.shape[1]).expand_as(sequences)

    def all_logits(hidden_states, output_layer, output_weight, **_):
        return predicted_logits(hidden_states, output_layer, output_weight, torch.arange(sequences.numel()))

    logits = torch.cat(_gathered(chunk(sequences, positions, None, output_processor=all_logits)), dim=-1)
    if rank == 0:
        torch.save(logits.reshape(sequences.shape[1], 2, -1).transpose(0, 1), folder / "logits.pt")


def _save_head_errors(step: int, chunk, folder: Path, rank: int) -> None:
    """Saves {case: (rows, relative error of the loss, of its gradient)} of the masked head against plain torch."""
    if step != 1:
        return
    layer = unwrap_model(chunk).output_layer
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(32, 2, layer.input_size, generator=generator)
    labels = torch.randint(VOCAB_SIZE, (2, 32), generator=generator)
    predicted = torch.rand(2, 32, generator=generator) < 0.4
    found = {
        "usual": _head_error(layer, hidden, labels, predicted, capacity=64),
        "more rows than the capacity": _head_error(layer, hidden, labels, predicted, capacity=8),
        "nothing predicted": _head_error(layer, hidden, labels, torch.zeros_like(predicted), capacity=8),
    }
    torch.save(found, folder / f"head_{rank}.pt")


@torch.enable_grad()
def _head_error(layer, hidden, labels, predicted, capacity: int) -> tuple[int, float, float]:
    weight = torch.cat(_gathered(layer.weight.detach()))[:VOCAB_SIZE]
    reference = hidden.clone().requires_grad_()
    logits = reference.transpose(0, 1)[predicted] @ weight.t()
    expected = torch.nn.functional.cross_entropy(logits, labels[predicted], reduction="sum")
    expected.backward()
    part = slice(None)
    if layer.sequence_parallel:
        length = len(hidden) // layer.tp_group.size()
        part = slice(layer.tp_group.rank() * length, (layer.tp_group.rank() + 1) * length)
    ours = hidden[part].clone().requires_grad_()
    rows = select_rows(predicted, labels, capacity, VOCAB_SIZE)
    loss = masked_loss(ours, layer, None, rows).sum()
    loss.backward()
    scale = reference.grad.norm().clamp(min=1e-6)
    error = (ours.grad - reference.grad[part]).norm() / scale
    return len(rows.rows), float((loss - expected).abs() / expected.abs().clamp(min=1e-6)), float(error)


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts
