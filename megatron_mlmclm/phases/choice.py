"""Which of a phase's objectives a sample is for: functions of its number, so that every rank and resume agrees."""

import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

from megatron_mlmclm.objectives import hash_key

# (the run's sample, first sample of its step, its step in the phase from 0) -> which objective
Choice = Callable[[int, int, int], int]


def first(_sample: int, _step_sample: int, _step: int) -> int:
    """Of a phase with one objective."""
    return 0


def mixed(shares: Sequence[float], seed: int, *, by_sample: bool) -> Choice:
    """Each sample (or each whole step) draws its objective at `shares`, keyed by (seed, number of the sample)."""
    total = sum(shares)
    edges = [int(edge / total * 2.0**64) for edge in accumulate(shares)][:-1]

    def choose(sample: int, step_sample: int, _step: int) -> int:
        word = hash_key("mixed", seed, sample if by_sample else step_sample, bits=64)
        return bisect.bisect_right(edges, word)

    return choose


def alternating(periods: Sequence[int]) -> Choice:
    """Objective 0 for `periods[0]` steps, then objective 1 for `periods[1]`, and so on, over and over (AntLM)."""
    edges = list(accumulate(periods))

    def choose(_sample: int, _step_sample: int, step: int) -> int:
        return bisect.bisect_right(edges, step % edges[-1])

    return choose
