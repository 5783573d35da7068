"""Batches whose sequences say who sees whom: by patterns that differ, by documents, or by padding.

That travels with the batch, in a `PackedSeqParams`. The layer's attribute would not do: full activation recomputation
runs a layer again in backward and reads the attribute as it is then, set for another micro-batch by a pipeline
schedule. The loss would be right and the gradients wrong.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_mlmclm.attention.pattern import Extent, Pattern
from megatron_mlmclm.errors import UserError


@dataclass
class PatternParams(PackedSeqParams):
    """Pattern and extent of each sequence of a micro-batch, [b], for core attention that `reads_patterns`."""

    patterns: tuple[Pattern, ...] = ()
    extents: tuple[Extent, ...] = ()


def pattern_params(
    patterns: Sequence[Pattern], seq_length: int, extents: Sequence[Extent] | None = None
) -> PatternParams:
    """For a micro-batch [s, b] of sequences of `seq_length`, whole ones unless `extents` says otherwise.

    Rotary embeddings take the larger of the two lengths, and cut it for context parallelism.
    """
    extents = extents or [Extent(seq_length)] * len(patterns)
    return PatternParams(
        qkv_format="sbhd",
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
        patterns=tuple(patterns),
        extents=tuple(extents),
    )


def extent_of(documents: Tensor, prefix: int = 0) -> Extent:
    """The extent of a sequence: `documents` int64 [S] on the CPU has each position's document, counted from 0.

    -1 stands on padding, which is on the right. `prefix` may reach into the padding, which has no part in it.

    Raises:
        UserError: padding before a token, or numbers that do not count the documents one by one.
    """
    length = int((documents >= 0).sum())
    real = documents[:length]
    if length and int(real.min()) < 0:
        at = int((documents < 0).nonzero()[0])
        raise UserError(f"documents: padding at position {at} is before a token; it must be on the right")
    steps = real.diff(prepend=real.new_tensor([-1]))
    starts = steps.nonzero().squeeze(1)
    if not bool((steps[starts] == 1).all()):
        raise UserError(f"documents: numbers {real[starts][:8].tolist()} must count from 0, one by one")
    cu_seqlens = (*starts.tolist(), length) if length else ()
    return Extent(length, cu_seqlens, min(prefix, length))


def attend_alike(
    attend: Callable[[Tensor, Tensor, Tensor, list[int]], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kinds: Sequence[Hashable],
) -> Tensor:
    """Call `attend` once for the sequences of one kind, with their places in the batch.

    query, key, value [s, b, heads, d] -> [s, b, heads * d].
    """
    places_of: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        places_of.setdefault(kind, []).append(place)
    if len(places_of) == 1:
        return attend(query, key, value, list(range(len(kinds))))
    # Split, not indexed: the gradient of an index is as large as the whole batch, once for each.
    sequences = [tensor.split(1, dim=1) for tensor in (query, key, value)]
    outputs: dict[int, Tensor] = {}
    for places in places_of.values():
        out = attend(*(joined([each[place] for place in places], dim=1) for each in sequences), places)
        outputs.update(zip(places, out.split(1, dim=1), strict=True))
    return torch.cat([outputs[place] for place in range(len(kinds))], dim=1)


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, but one tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)
