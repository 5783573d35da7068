"""Patterns and extents as values, the tiles they come to, and what is refused."""

import random

import pytest
import torch

from megatron_mlmclm.attention import Extent, Pattern, extent_of
from megatron_mlmclm.attention.tiles import TILE, tiles_of
from megatron_mlmclm.errors import UserError
from tests.attention import dense

REFUSED = {
    "no such direction": (lambda: Pattern("sideways"), "sideways"),
    "window with prefix": (lambda: Pattern("prefix", window=(4, 4)), "prefix"),
    "window below -1": (lambda: Pattern("causal", window=(-2, 0)), "[-2, 0]"),
    "every k-th layer without a window": (lambda: Pattern("causal", global_every=3), "global_every 3"),
    "every 0-th layer": (lambda: Pattern("causal", window=(4, 4), global_every=0), "global_every 0"),
    "prefix beyond the sequence": (lambda: Extent(8, prefix=9), "prefix 9"),
    "cu_seqlens from 1": (lambda: Extent(8, (1, 8)), "starts at 1"),
    "cu_seqlens that stand": (lambda: Extent(8, (0, 3, 3, 8)), "cu_seqlens[2] is 3 after 3"),
    "cu_seqlens that fall": (lambda: Extent(8, (0, 5, 3, 8)), "cu_seqlens[2] is 3 after 5"),
    "cu_seqlens that end early": (lambda: Extent(8, (0, 3)), "ends at 3"),
    "cu_seqlens that end late": (lambda: Extent(8, (0, 3, 9)), "ends at 9"),
    "left padding": (lambda: extent_of(torch.tensor([-1, -1, 0, 0])), "position 0"),
    "inner padding": (lambda: extent_of(torch.tensor([0, -1, 1, 1])), "position 1"),
    "a document left out": (lambda: extent_of(torch.tensor([0, 0, 2, 2])), "[0, 2]"),
    "documents that come back": (lambda: extent_of(torch.tensor([0, 1, 0, 0])), "[0, 1, 0]"),
    "documents from 1": (lambda: extent_of(torch.tensor([1, 1, 2])), "[1, 2]"),
    "longer than seq_length": (lambda: tiles_of(Pattern("causal"), Extent(9), 8, ((0, 8),)), "9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_that_says_what(case):
    make, said = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        make()
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_extent_from_document_numbers():
    assert extent_of(torch.tensor([0, 0, 1, 2, 2, -1, -1]), prefix=6) == Extent(5, (0, 2, 3, 5), 5)
    assert extent_of(torch.tensor([0, 0, 0])) == Extent(3, (0, 3))
    assert extent_of(torch.tensor([-1, -1])) == Extent(0)


def test_a_phase_is_one_value():
    assert Pattern("causal", window=(4, 4)) == Pattern("causal", window=(4, 4))
    assert len({Pattern("causal"), Pattern("causal"), Pattern("causal", documents=True)}) == 2


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        (Pattern("causal"), [(-1, 0)] * 4),
        (Pattern("bidirectional"), [(-1, -1)] * 4),
        (Pattern("causal", window=(7, 7)), [(7, 0)] * 4),
        (Pattern("bidirectional", window=(7, 5), global_every=3), [(-1, -1), (7, 5), (7, 5), (-1, -1)]),
        (Pattern("causal", window=(7, 5), global_every=2), [(-1, 0), (7, 0), (-1, 0), (7, 0)]),
    ],
)
def test_the_window_of_each_layer(pattern, sizes):
    """As ModernBERT: of layers counted from 0, those divisible by `global_every` see all."""
    assert [pattern.of_layer(number).window_size for number in (1, 2, 3, 4)] == sizes


def seen_by(tiles, pattern: Pattern, length: int) -> torch.Tensor:
    """What the tiles let through, bool [length, length]; a query must be in one tile alone."""
    seen, covered = torch.zeros(length, length, dtype=torch.bool), torch.zeros(length, dtype=torch.int)
    left, right = pattern.window_size if pattern.direction != "prefix" else (-1, 0)
    for (start, end), (first, last), rule in tiles:
        covered[start:end] += 1
        for row in range(start, end):
            for column in range(first, last):
                inside = (left < 0 or row - column <= left) and (right < 0 or column - row <= right)
                seen[row, column] = {"all": True, "causal": column <= row, "band": inside, "none": False}[rule]
    assert covered.max() <= 1
    return seen


@pytest.mark.parametrize("name", dense.PATTERNS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_tiles_cover_what_may_be_seen(name, parts, monkeypatch):
    """Drawn extents; with `parts` ranks, each has its two chunks and together they have all."""
    monkeypatch.setattr("megatron_mlmclm.attention.tiles.TILE", 5)
    tiles_of.cache_clear()
    draw = random.Random(f"{name} {parts}")
    pattern, seq_length = dense.PATTERNS[name], 32
    for _ in range(8):
        length = draw.randint(1, seq_length)
        cuts = tuple(sorted(draw.sample(range(1, seq_length), draw.randint(0, 5))))
        extent = dense.extent(length, cuts, prefix=draw.randint(0, length))
        seen = torch.zeros(seq_length, seq_length, dtype=torch.bool)
        chunk = seq_length // (2 * parts)
        for rank in range(parts):
            held = tuple((n * chunk, (n + 1) * chunk) for n in (rank, 2 * parts - 1 - rank))
            tiles = tiles_of(pattern, extent, seq_length, held)
            assert [row for tile in tiles for row in range(*tile.queries)] == [row for h in held for row in range(*h)]
            seen |= seen_by(tiles, pattern, seq_length)
        assert torch.equal(seen, dense.visible(pattern, extent, seq_length))
    tiles_of.cache_clear()


@pytest.mark.parametrize("name", dense.PATTERNS)
def test_no_tile_is_wider_than_its_pattern(name):
    """Work stays that of the pattern: documents of 512 do not meet, windows see their neighbourhood."""
    pattern, length = dense.PATTERNS[name], 8192
    extent = Extent(length, tuple(range(0, length + 1, 512)), prefix=100)
    tiles = tiles_of(pattern, extent, length, ((0, length),))
    pairs = sum((tile.queries[1] - tile.queries[0]) * (tile.keys[1] - tile.keys[0]) for tile in tiles)
    if pattern.documents:
        assert pairs <= length * 512
    elif pattern.window and min(pattern.window) >= 0:
        assert pairs <= length * (TILE + sum(pattern.window))
