"""Best-fit decreasing: pieces into as few samples as can be had cheaply (Ding et al. 2024, arXiv 2404.10830, do so).

Sizes are whole numbers up to the capacity, so pieces of one size and bins with one room are handled together: the work
grows with the pairs of size and room that occur, not with pieces, and never with pieces times bins.
"""

from bisect import bisect_left, insort

import numpy as np


class _OpenBins:
    """Bins that have room left, by how much."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # rising, those that occur
        self._bins: dict[int, list[int]] = {}

    def fitting(self, size: int) -> int | None:
        """The least room that holds `size`."""
        at = bisect_left(self._rooms, size)
        return self._rooms[at] if at < len(self._rooms) else None

    def add(self, room: int, bins: list[int]) -> None:
        if room not in self._bins:
            insort(self._rooms, room)
            self._bins[room] = []
        self._bins[room] += bins

    def take(self, room: int, count: int) -> list[int]:
        """At most `count` bins, one or more, with this room."""
        bins = self._bins[room]
        taken = bins[-count:]
        del bins[-count:]
        if not bins:
            del self._bins[room]
            del self._rooms[bisect_left(self._rooms, room)]
        return taken


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each piece, from 0, int64 [pieces], where `sizes` (int64 [pieces]) are from 1 to `capacity`.

    Longest pieces first, each into the bin that it leaves with the least room, or into a new one. Among equal bins the
    last that came to this room is taken: the outcome is a function of (sizes, capacity).
    """
    open_bins, opened = _OpenBins(), 0
    chosen: list[int] = []  # bins in the order of pieces that falls with their size,
    repeats: list[int] = []  # and how many pieces each is given
    values, counts = np.unique(sizes, return_counts=True)
    for size, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            room = open_bins.fitting(size)
            if room is None:
                room, fresh = capacity, -(-left // (capacity // size))
                open_bins.add(room, list(range(opened, opened + fresh)))
                opened += fresh
            each = min(room // size, left)  # having taken one piece, a bin is the best fit for the next
            taken = open_bins.take(room, left // each)
            open_bins.add(room - each * size, taken)
            chosen += taken
            repeats += [each] * len(taken)
            left -= each * len(taken)
    bins = np.empty(len(sizes), np.int64)
    bins[np.argsort(-sizes, kind="stable")] = np.repeat(np.array(chosen, np.int64), repeats)
    return bins
