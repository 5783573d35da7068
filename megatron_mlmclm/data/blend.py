"""Which sample of which source comes n-th: a pure function of (sizes, weights, seed), see DESIGN 4a.2.

The blend walks the van der Corput sequence: the bits of m, reversed, as a fraction. Any stretch of it covers [0, 1)
evenly, so each source, an interval as wide as its weight, is met in proportion at once and for ever. How often an
interval was met before m has a closed form, so a source's own counter needs no state. The walk alternates regularly;
to break its rhythm n is permuted inside blocks of 1,024 first.
"""

import bisect
import math
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megatron_mlmclm.data.order import permute
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives.keyed import hash_key

BLOCK = 1024
BITS = 60  # of the walk: as many samples as any run has, and two digits of a Python int
_WHOLE = 1 << BITS


class SampleId(NamedTuple):
    """A sample's name: which source, which pass over it, which sample of its `TokenStream`."""

    source: int
    epoch: int
    index: int


class Blend:
    """An endless, stateless sequence of samples from one or more sources.

    `sizes`: samples per epoch of each source. `weights`: the share of each, any positive scale. Errors: UserError.
    """

    def __init__(self, sizes: list[int], weights: list[float], seed: int) -> None:
        _check(sizes, weights)
        self.sizes, self.weights, self.seed = list(sizes), list(weights), seed
        self._edges = _edges(weights)

    def locate(self, n: int) -> SampleId:
        """The n-th sample of the run, n >= 0. O(log n + log sources)."""
        source, count = self._draw(n)
        epoch, place = divmod(count, self.sizes[source])
        return SampleId(source, epoch, permute(place, self.sizes[source], _order_key(self.seed, source, epoch)))

    def counts(self, n: int) -> list[int]:
        """How many of the first n samples each source gives, [sources]. Exact; walks the last, part block only."""
        if len(self.sizes) == 1:
            return [n]
        whole = n - n % BLOCK
        totals = [_met_between(low, high, whole) for low, high in pairwise(self._edges)]
        for m in range(whole, n):
            totals[self._source(_reversed(self._step(m)))] += 1
        return totals

    def _draw(self, n: int) -> tuple[int, int]:
        """Source of the n-th sample and how many samples of that source come before it in the walk."""
        if not 0 <= n < _WHOLE:
            raise IndexError(f"sample {n}")
        if len(self.sizes) == 1:
            return 0, n
        m = self._step(n)
        source = self._source(_reversed(m))
        return source, _met_between(self._edges[source], self._edges[source + 1], m)

    def _step(self, n: int) -> int:
        block, place = divmod(n, BLOCK)
        return block * BLOCK + permute(place, BLOCK, _block_key(self.seed, block))

    def _source(self, point: int) -> int:
        return bisect.bisect_right(self._edges, point) - 1


def _check(sizes: list[int], weights: list[float]) -> None:
    if len(sizes) != len(weights) or not sizes:
        raise UserError(f"blend: {len(sizes)} sources but {len(weights)} weights; give one weight per source")
    for place, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(
                f"blend: weight {weight} of source {place} must be positive and finite; leave it out for none"
            )
        if size < 1:
            raise UserError(f"blend: source {place} has {size} samples; it needs 1 or more")


def _edges(weights: list[float]) -> list[int]:
    """Cumulative weights as whole numbers from 0 to 2**BITS, [sources + 1]; in fractions, so alike on any machine."""
    exact = [Fraction(weight) for weight in weights]
    total, reached, edges = sum(exact), Fraction(0), [0]
    for place, weight in enumerate(exact):
        reached += weight
        edges.append(round(reached / total * _WHOLE))
        if edges[-1] == edges[-2]:
            raise UserError(f"blend: weight {weights[place]} of source {place} is too small beside the others")
    return edges


def _reversed(m: int) -> int:
    """The BITS bits of m in reverse order: the walk's m-th point, of 2**BITS."""
    return int(f"{m:0{BITS}b}"[::-1], 2)


def _met_between(low: int, high: int, m: int) -> int:
    """How many of the walk's first m points lie in [low, high).

    [0, m) falls into one run of 2**j numbers per set bit j of m. The points of a run are evenly spaced, 2**(BITS - j)
    apart, from the reverse of the run's first number, which is below that spacing.
    """
    met, first = 0, _reversed(m)
    while m:
        bit = m & -m
        m ^= bit
        shift = BITS + 1 - bit.bit_length()
        first ^= 1 << (shift - 1)
        reach = (1 << shift) - 1 - first
        met += ((high + reach) >> shift) - ((low + reach) >> shift)
    return met


@lru_cache(maxsize=256)
def _block_key(seed: int, block: int) -> int:
    return hash_key(seed, "block", block)


@lru_cache(maxsize=8192)
def _order_key(seed: int, source: int, epoch: int) -> int:
    return hash_key(seed, "order", source, epoch)
