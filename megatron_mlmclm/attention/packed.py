"""What a pattern is in Transformer Engine's terms: mask type, window, and sequences packed as `thd`.

Kept apart from `te.py`, which can be imported only where TE is.
"""

from collections.abc import Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_mlmclm.attention.pattern import UNBOUNDED, Extent, Pattern

LOCAL = "the local implementation can (--transformer-impl local)"


def te_refusal(pattern: Pattern, context_parallel_size: int) -> str | None:
    """Why TE cannot do `pattern`, and what can; None if it can.

    TE's context parallelism lays out packed documents in another way than whole sequences (each in 2 * cp chunks of its
    own), and takes no mask. Its windows are bounded on both sides or on none (`check_set_window_size`).
    """
    if pattern.travels and context_parallel_size > 1:
        what = "documents" if pattern.documents else "attention: prefix"
        return f"Transformer Engine cannot do {what} under context parallelism, {LOCAL}"
    left, right = pattern.window_size
    if pattern.direction != "causal" and (left == UNBOUNDED) != (right == UNBOUNDED):
        return f"Transformer Engine cannot bound one side of a window alone, as {[left, right]} does, {LOCAL}"
    return None


def packed_params(
    pattern: Pattern, extents: Sequence[Extent], seq_length: int, device: torch.device
) -> PackedSeqParams | None:
    """For sequences [b * seq_length] laid end to end; None where each is one document without padding.

    Padding is a document of its own: visible to no other, and of no matter, since `unpack` makes it zeros. TE turns the
    mask type of `thd` to "padding_causal" or "padding".
    """
    ends = [0]
    for number, extent in enumerate(extents):
        ends += [number * seq_length + end for _, end in extent.documents(pattern)]
        if extent.length < seq_length:
            ends.append((number + 1) * seq_length)
    if ends == list(range(0, len(extents) * seq_length + 1, seq_length)):
        return None  # a sequence of nothing but padding is as good as a whole one: nothing of it is kept
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in zip(ends, ends[1:], strict=False))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def pack(tensor: Tensor) -> Tensor:
    """[s, b, heads, d] -> [b * s, heads, d], sequence after sequence."""
    return tensor.transpose(0, 1).flatten(0, 1)


def unpack(tensor: Tensor, batch: int) -> Tensor:
    """[b * s, heads * d] -> [s, b, heads * d]."""
    return tensor.reshape(batch, -1, tensor[0].numel()).transpose(0, 1)


def without_padding(tensor: Tensor, extents: Sequence[Extent]) -> Tensor:
    """[s, b, n] with zeros, and no gradient, where the sequences are padding."""
    lengths = [extent.length for extent in extents]
    if min(lengths) == len(tensor):
        return tensor
    position = torch.arange(len(tensor), device=tensor.device)[:, None]
    return tensor.masked_fill((position >= torch.tensor(lengths, device=tensor.device))[..., None], 0.0)


def hidden(pattern: Pattern, extent: Extent, seq_length: int, device: torch.device) -> Tensor:
    """TE's mask of a prefix pattern, bool [1, 1, s, s]: True hides. Padding sees itself, lest its softmax be 0 / 0."""
    position = torch.arange(seq_length, device=device)
    visible = (position[None] <= position[:, None]) | (position[None] < extent.prefix)
    document = torch.full_like(position, -1)
    for number, (start, end) in enumerate(extent.documents(pattern)):
        document[start:end] = number
    visible &= (document[None] == document[:, None]) & (document[None] >= 0)
    return ~(visible | (position[None] == position[:, None]))[None, None]
