"""Batches whose sequences differ in who sees whom.

Their patterns travel with the batch, in a `PackedSeqParams`. The layer's attribute would not do: full activation
recomputation runs a layer again in backward and reads the attribute as it is then, set for another micro-batch by a
pipeline schedule. The loss would be right and the gradients wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_mlmclm.attention.pattern import Pattern


@dataclass
class PatternParams(PackedSeqParams):
    """The pattern of each sequence of a micro-batch, [b], for core attention that reads them (`reads_patterns`)."""

    patterns: tuple[Pattern, ...] = ()


def pattern_params(patterns: Sequence[Pattern], seq_length: int) -> PatternParams:
    """For a micro-batch [s, b] of whole sequences. Rotary embeddings take the larger of the two lengths."""
    return PatternParams(qkv_format="sbhd", max_seqlen_q=seq_length, max_seqlen_kv=seq_length, patterns=tuple(patterns))


def attend_by_pattern(
    attend: Callable[[Tensor, Tensor, Tensor, Pattern], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    patterns: Sequence[Pattern],
) -> Tensor:
    """Call `attend` once for the sequences of each pattern; query, key, value [s, b, heads, d] -> [s, b, heads * d]."""
    of_pattern: dict[Pattern, list[int]] = {}
    for place, pattern in enumerate(patterns):
        of_pattern.setdefault(pattern, []).append(place)
    if len(of_pattern) == 1:
        return attend(query, key, value, patterns[0])
    outputs, order = [], []
    for pattern, places in of_pattern.items():
        index = torch.tensor(places, device=query.device)
        outputs.append(attend(*(each.index_select(1, index) for each in (query, key, value)), pattern))
        order += places
    back = torch.tensor(order, device=query.device).argsort()
    return torch.cat(outputs, dim=1).index_select(1, back)


def prefix_visible(prefix: int, length: int, device: torch.device) -> Tensor:
    """Which position (row) may see which (column) under a prefix pattern, bool [length, length]."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    visible[:, :prefix] = True
    return visible
