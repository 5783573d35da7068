"""A pattern as tiles: which stretches of queries meet which stretches of keys, so that no [s, s] mask is made.

Pure arithmetic on positions; `sdpa.py` carries it out.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from megatron_mlmclm.attention.pattern import UNBOUNDED, Extent, Pattern, Window
from megatron_mlmclm.errors import UserError

Stretch = tuple[int, int]  # positions [start, end)

# Queries of a tile whose mask is written out. Small ones waste less of a window, large ones call the kernel less often.
TILE = 256


class Tile(NamedTuple):
    """Queries [start, end) over keys [start, end), positions of the sequence.

    `rule`: "all" of the keys are seen; "causal" is the square whose queries are its keys; a "band" is masked by the
    window and what is to the right of a causal position; "none" is seen, by padding.
    """

    queries: Stretch
    keys: Stretch
    rule: Literal["all", "causal", "band", "none"]

    @property
    def shape(self) -> tuple[int, int, int, str]:
        """(queries, keys, first query - first key, rule): tiles of one shape are attended in one call."""
        (start, end), (first, last) = self.queries, self.keys
        return end - start, last - first, start - first, self.rule


@lru_cache(maxsize=1024)  # every layer and every recomputation asks again
def tiles_of(pattern: Pattern, extent: Extent, seq_length: int, held: tuple[Stretch, ...]) -> tuple[Tile, ...]:
    """Tiles that cover the queries of `held`, the rising stretches of [0, seq_length) that this rank has, in order.

    `pattern` is that of one layer (`Pattern.of_layer`). UserError if the extent is longer than `seq_length`.
    """
    if extent.length > seq_length:
        raise UserError(f"a sequence of {extent.length} tokens does not fit seq_length {seq_length}")
    tiles: list[Tile] = []
    for start, end in held:
        for document in extent.documents(pattern):
            for part, keys, causal in _directions(pattern, extent, document):
                queries = max(start, part[0]), min(end, part[1])
                if queries[0] < queries[1]:
                    tiles += _tiles(queries, keys, pattern.window_size, causal)
        padding = max(start, extent.length), end
        if padding[0] < padding[1]:
            tiles.append(Tile(padding, (0, 0), "none"))
    return tuple(tiles)


def _directions(pattern: Pattern, extent: Extent, document: Stretch) -> list[tuple[Stretch, Stretch, bool]]:
    """(queries, keys, whether causal) of a document: what is in the prefix, and what is after it."""
    start, end = document
    if pattern.direction != "prefix":
        return [(document, document, pattern.direction == "causal")]
    middle = min(max(start, extent.prefix), end)
    return [((start, middle), (start, middle), False), ((middle, end), document, True)]


def _tiles(queries: Stretch, keys: Stretch, window: Window, causal: bool) -> list[Tile]:
    """The tiles of some of a document's queries."""
    reach = keys[1] - keys[0] - 1
    left, right = (UNBOUNDED if width >= reach else width for width in window)
    if left == UNBOUNDED and causal and queries[0] == keys[0]:
        return [Tile(queries, queries, "causal")]
    if left == right == UNBOUNDED and not causal:
        return [Tile(queries, keys, "all")]
    tiles = []
    for start in range(*queries, TILE):
        end = min(start + TILE, queries[1])
        first = keys[0] if left == UNBOUNDED else max(keys[0], start - left)
        last = end if causal else keys[1] if right == UNBOUNDED else min(keys[1], end + right)
        tiles.append(Tile((start, end), (first, last), "band"))
    return tiles
