"""An independent reference: who sees whom, written out position by position, and plain softmax over it."""

import math

import torch

from megatron_mlmclm.attention import Extent, Pattern

PATTERNS = {
    "causal": Pattern("causal"),
    "bidirectional": Pattern("bidirectional"),
    "prefix": Pattern("prefix"),
    "causal documents": Pattern("causal", documents=True),
    "bidirectional documents": Pattern("bidirectional", documents=True),
    "prefix documents": Pattern("prefix", documents=True),
    "causal window": Pattern("causal", window=(5, 5)),
    "bidirectional window": Pattern("bidirectional", window=(5, 3)),
    "left window": Pattern("bidirectional", window=(4, 0)),
    "open window": Pattern("bidirectional", window=(-1, 2)),
    "window documents": Pattern("bidirectional", documents=True, window=(6, 6)),
    "causal window documents": Pattern("causal", documents=True, window=(3, 3)),
}


def extent(length: int, cuts: tuple[int, ...] = (), prefix: int = 0) -> Extent:
    """Documents that begin at 0 and at each of `cuts`."""
    return Extent(length, (0, *(cut for cut in cuts if cut < length), length), prefix)


def sees(pattern: Pattern, extent: Extent, row: int, column: int, layer_number: int = 1) -> bool:
    """Whether position `row` may see position `column`."""
    if row >= extent.length or column >= extent.length:
        return False
    if pattern.documents:
        edges = extent.cu_seqlens
        if any(row < edge <= column or column < edge <= row for edge in edges):
            return False
    if pattern.direction == "causal" and column > row:
        return False
    if pattern.direction == "prefix" and column > row and not (row < extent.prefix and column < extent.prefix):
        return False
    every = pattern.global_every
    if pattern.window is None or (every is not None and layer_number % every == 1 % every):
        return True
    left, right = pattern.window
    return (left < 0 or row - column <= left) and (right < 0 or column - row <= right)


def visible(pattern: Pattern, extent: Extent, length: int, layer_number: int = 1) -> torch.Tensor:
    """`sees` for all positions, bool [length, length]."""
    rows = range(length)
    return torch.tensor([[sees(pattern, extent, row, column, layer_number) for column in rows] for row in rows])


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one sequence in plain arithmetic: [heads, s, d], [groups, s, d] twice -> [s, heads * d].

    Positions that see nothing give zeros.
    """
    heads, length, width = query.shape
    key, value = (t.repeat_interleave(heads // t.shape[0], dim=0) for t in (key, value))
    scores = query @ key.transpose(1, 2) / math.sqrt(width)
    weights = torch.where(seen, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return (weights @ value).transpose(0, 1).reshape(length, heads * width)
