"""What the attention tests look at in a live model: who moves whom, logits, and packed against separate documents."""

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_mlmclm.attention import Extent, Pattern, pattern_params, set_pattern, verify
from megatron_mlmclm.model import predicted_logits
from tests.attention import dense
from tests.parallel.fixed import fixed_sequences

STEP = 1
LENGTH = 32
CHANGED = (0, 7, 8, 17, 22, 31)
PATTERNS = dense.PATTERNS | {"every other window": Pattern("bidirectional", window=(3, 2), global_every=3)}
LENGTHS = {False: (LENGTH, LENGTH), True: (26, 29)}


def extents(padded: bool) -> list[Extent]:
    """Of the two fixed sequences."""
    first, second = LENGTHS[padded]
    return [dense.extent(first, (8, 20), prefix=9), dense.extent(second, (5, 6, 22), prefix=4)]


def save(step: int, chunk, folder: Path, rank: int) -> None:
    """Saves what is found after step STEP. The patterns are gone through twice: each is set on the live model."""
    if step != STEP:
        return
    live = Pattern(dense_direction(chunk))
    cases = [(name, batch, padded) for padded in (False, True) for batch in (1, 2) for name in PATTERNS]
    found = {
        "moved": {case: _moved(chunk, *case) for case in cases},
        "again": {case: _moved(chunk, *case) for case in reversed(cases[: len(PATTERNS)])},
        "logits": {name: _logits(chunk, pattern) for name, pattern in PATTERNS.items()},
        "packed": {name: _packed_errors(chunk, PATTERNS[name]) for name in PATTERNS if PATTERNS[name].documents},
    }
    set_pattern([chunk], live)
    torch.save(found, folder / f"patterns_{rank}.pt")


def dense_direction(chunk) -> str:
    """The direction that the first layer is set to."""
    kind = unwrap_model(chunk).decoder.layers[0].self_attention.attn_mask_type.name
    return {"causal": "causal", "no_mask": "bidirectional"}[kind]


def _moved(chunk, name: str, batch: int, padded: bool) -> torch.Tensor:
    """Which outputs [changed token, sequence, position] move when a token of the first sequence does."""
    pattern, own = PATTERNS[name], extents(padded)[:batch]
    params = None
    if pattern.direction != "prefix":
        set_pattern([chunk], pattern)
        verify([chunk], pattern)
    if pattern.travels or padded:
        params = pattern_params([pattern] * batch, LENGTH, own)
    sequences = fixed_sequences(LENGTH)[:batch]
    before = _hidden(chunk, sequences, params)
    moved = []
    for position in CHANGED:
        changed = sequences.clone()
        changed[0, position] += 1
        moved.append((_hidden(chunk, changed, params) - before).abs().amax(-1).gt(0).t())
    return torch.stack(moved)


def _hidden(chunk, sequences: torch.Tensor, params) -> torch.Tensor:
    positions = torch.arange(sequences.shape[1]).expand_as(sequences)
    keep = {"output_processor": lambda hidden_states, **_: hidden_states}
    return chunk(sequences, positions, None, packed_seq_params=params, **keep)


def _logits(chunk, pattern: Pattern) -> torch.Tensor:
    """Of the fixed sequences, padded, [2, s, padded vocabulary]."""
    sequences = fixed_sequences(LENGTH)
    positions = torch.arange(LENGTH).expand_as(sequences)

    def all_logits(hidden_states, output_layer, output_weight, **_):
        return predicted_logits(hidden_states, output_layer, output_weight, torch.arange(sequences.numel()))

    params = pattern_params([pattern] * 2, LENGTH, extents(padded=True))
    logits = chunk(sequences, positions, None, packed_seq_params=params, output_processor=all_logits)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1).reshape(LENGTH, 2, -1).transpose(0, 1)


@torch.enable_grad()
def _packed_errors(chunk, pattern: Pattern) -> tuple[float, float]:
    """Two documents in one sequence against a forward of each: largest error of outputs and of gradients, relative.

    The second document's rotary positions go on from the first in one, and start at 0 in the other.
    """
    sequence, edge, prefix = fixed_sequences(LENGTH)[:1], 13, 4
    weight = torch.randn(LENGTH, 1, unwrap_model(chunk).config.hidden_size, generator=torch.Generator().manual_seed(4))
    parameters = [p for p in chunk.parameters() if p.requires_grad]

    def gradients(outputs: torch.Tensor) -> list[torch.Tensor]:
        chunk.zero_grad_buffer()
        for p in parameters:
            p.grad = None  # the optimizer's: after a step it may be `main_grad` itself
        (outputs * weight).sum().backward()
        return [p.main_grad.clone() for p in parameters if p.main_grad.any()]  # the output layer has none

    packed = _hidden(chunk, sequence, pattern_params([pattern], LENGTH, [dense.extent(LENGTH, (edge,), prefix)]))
    parts = []
    for part in (sequence[:, :edge], sequence[:, edge:]):
        length = part.shape[1]
        extent = Extent(length, prefix=0 if parts else prefix)
        parts.append(_hidden(chunk, part, pattern_params([pattern], length, [extent])))
    apart = torch.cat(parts)
    output_error = (packed - apart).norm() / apart.norm()
    pairs = list(zip(gradients(packed), gradients(apart), strict=True))
    return float(output_error), max(float((mine - other).norm() / other.norm()) for mine, other in pairs)
