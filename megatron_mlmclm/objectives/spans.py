"""Contiguous spans of geometric length, as SpanBERT hides them (arXiv 1907.10529)."""

import numpy as np

from megatron_mlmclm.objectives.keyed import draw_u64, hash_key, threshold_u64


def length_thresholds(mean: float, longest: int) -> np.ndarray:
    """Words that divide span lengths, uint64 [longest - 1], ascending: a draw above k of them is a span of k + 1.

    Lengths are those of min(Geometric(p), longest), with p such that their mean is `mean` after the clip: with
    q = 1 - p it is the sum of q^k over k < longest, which rises with q from 1 to `longest`.
    """
    low, high = 0.0, 1.0
    for _ in range(64):
        middle = (low + high) / 2.0
        low, high = (middle, high) if sum(middle**k for k in range(longest)) < mean else (low, middle)
    return np.array([threshold_u64(1.0 - high**length) for length in range(1, longest)], dtype=np.uint64)


def draw_lengths(key: int, count: int, thresholds: np.ndarray) -> np.ndarray:
    """`count` span lengths, int64 [count], from a stream of their own beside that of `key`."""
    return 1 + np.searchsorted(thresholds, draw_u64(hash_key("spans", key), count))


def choose_spans(eligible: np.ndarray, draws: np.ndarray, key: int, budget: int, thresholds: np.ndarray) -> np.ndarray:
    """Exactly `budget` of the `eligible` positions (bool [S]; all, where there are fewer) in spans, bool [S].

    Spans start at eligible positions in the order of their `draws` (uint64 [S]) and end early at a position that is not
    eligible or already taken; the last one is cut where the budget is met. So a smaller budget takes a subset.
    """
    places = np.flatnonzero(eligible)
    starts = places[np.argsort(draws[places])[:budget]]
    lengths = draw_lengths(key, len(starts), thresholds)
    free = bytearray(eligible)  # a plain loop over bytes: numpy's calls cost ten times as much on a few tokens
    free.append(0)  # stops a span at the end
    left, place = budget, 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        place, end = start, start + length
        while place < end and free[place]:
            free[place] = 0
            place += 1
        left -= place - start
        if left <= 0:
            free[place + left : place] = b"\1" * -left  # give back what the last span took too many
            break
    return eligible & ~np.frombuffer(free, dtype=bool)[:-1]
