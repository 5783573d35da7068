"""What the parallel tests look at inside a running world, and how megatron is made to forget a run."""

import contextlib
import gc
import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from megatron.training import get_args, global_vars, training

from megatron_mlmclm.loop import run as run_module
from megatron_mlmclm.loop.forward import ForwardStep
from megatron_mlmclm.model import masked_loss, predicted_logits, select_rows
from megatron_mlmclm.model.init import sharded_tensors
from tests.parallel import attention_probe
from tests.parallel.fixed import (
    CHANGED_POSITION,
    LAST_POSITIONS,
    LAST_STEP,
    VOCAB_SIZE,
    documents_of,
    fixed_sequences,
)


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
    if "pipeline" in names:
        _after_each_step(lambda step, chunks: _save_pipeline_logits(chunks, request.recipe, folder, rank), whole=True)
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
    # Megatron's wrapper is in a cycle with autograd's nodes, which the collector does not see: model, optimizer and
    # process groups, with three threads each, would live on and slow every later run of this process.
    for thing in gc.get_objects():
        if isinstance(thing, DistributedDataParallel):
            thing.grad_accs.clear()
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
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


def _after_each_step(look, whole: bool = False) -> None:
    """Call `look(step, model chunk)` after each training step; with `whole`, all of this rank's chunks."""
    inner = training.train_step

    def train_step(forward_step_func, data_iterator, model, *rest, iteration, **kwargs):
        result = inner(forward_step_func, data_iterator, model, *rest, iteration=iteration, **kwargs)
        model[0].eval()
        with torch.no_grad():
            look(iteration + 1, model if whole else model[0])
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


def _save_pipeline_logits(chunks, recipe, folder: Path, rank: int) -> None:
    """Saves the logits at the last positions of the fixed sequences, [b, LAST_POSITIONS, padded vocabulary].

    Through the whole pipeline, by Megatron's own schedule.
    """
    batch, length = recipe.batch.micro_batch_size, recipe.model.seq_length
    sequences = fixed_sequences(length)[:batch]
    positions = torch.arange(length).expand_as(sequences)
    rows = torch.arange((length - LAST_POSITIONS) * batch, length * batch)  # position by position

    def last_logits(hidden_states, output_layer, output_weight, **_):
        return predicted_logits(hidden_states, output_layer, output_weight, rows)

    def step(_, model):
        return model(sequences, positions, None, output_processor=last_logits), lambda out, non_loss_data: out

    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=batch,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if parallel_state.is_pipeline_last_stage():
        logits = torch.cat(_gathered(found[0]), dim=-1).reshape(LAST_POSITIONS, batch, -1).transpose(0, 1)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            torch.save(logits.clone(), folder / "logits.pt")


def _save_head_errors(step: int, chunk, folder: Path, rank: int) -> None:
    """Saves {case: (rows, relative error of the loss, of its gradient)} of the masked head against plain torch."""
    if step != 1:
        return
    layer = unwrap_model(chunk).output_layer
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(32, 2, layer.input_size, generator=generator)
    labels = torch.randint(VOCAB_SIZE, (2, 32), generator=generator)
    predicted = torch.rand(2, 32, generator=generator) < 0.4
    nothing = torch.zeros_like(predicted)
    found = {}
    for head in ("whole", "chunked", "dense"):
        error = partial(_head_error, layer, hidden, labels, head=head)
        found[f"{head}, usual"] = error(predicted, capacity=64)
        found[f"{head}, more rows than the capacity"] = error(predicted, capacity=8)
        found[f"{head}, nothing predicted"] = error(nothing, capacity=8)
    torch.save(found, folder / f"head_{rank}.pt")


@torch.enable_grad()
def _head_error(layer, hidden, labels, predicted, capacity: int, head: str) -> tuple[int, float, float]:
    weight = torch.cat(_gathered(layer.weight.detach()))[:VOCAB_SIZE].double().requires_grad_()
    reference = hidden.double().requires_grad_()
    logits = reference.transpose(0, 1)[predicted] @ weight.t()
    expected = torch.nn.functional.cross_entropy(logits, labels[predicted], reduction="sum")
    wanted, wanted_weight = torch.autograd.grad(expected, (reference, weight))
    part, columns = slice(None), len(layer.weight)
    if layer.sequence_parallel:
        length = len(hidden) // layer.tp_group.size()
        part = slice(layer.tp_group.rank() * length, (layer.tp_group.rank() + 1) * length)
    ours = hidden[part].clone().requires_grad_()
    rows = select_rows(predicted, labels, capacity, VOCAB_SIZE)
    layer.weight.main_grad.zero_()
    layer.weight.grad_added_to_main_grad = False
    loss = masked_loss(ours, layer, None, rows, head).sum()
    found, _ = torch.autograd.grad(loss, (ours, layer.weight))
    assert layer.weight.grad_added_to_main_grad  # all forms of the head give it to Megatron, none to autograd
    found_weight = layer.weight.main_grad.clone()
    first = layer.tp_group.rank() * columns
    wanted_weight = torch.nn.functional.pad(wanted_weight, (0, 0, 0, columns))[first : first + columns]
    errors = [
        float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6))
        for ours, theirs in ((loss, expected), (found, wanted[part]), (found_weight, wanted_weight))
    ]
    return len(rows.rows), errors[0], max(errors[1:])


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts
