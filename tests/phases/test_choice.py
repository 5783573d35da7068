"""Which objective of a mixed or alternating phase a sample is for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.phases import alternating, mixed

SHARES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(SHARES, st.integers(0, 2**40), st.integers(0, 2**40), st.booleans())
def test_a_mix_is_a_function_of_the_sample_or_of_its_step(shares, sample, step_sample, by_sample):
    choose = mixed(shares, 7, by_sample=by_sample)
    chosen = choose(sample, step_sample, 0)
    assert 0 <= chosen < len(shares)
    assert mixed(shares, 7, by_sample=by_sample)(sample, step_sample, 3) == chosen
    if by_sample:
        assert choose(sample, step_sample + 1, 0) == chosen
    else:
        assert choose(sample + 1, step_sample, 0) == chosen


def test_shares_are_what_was_asked_for():
    """Chi-square over 2e5 samples, on any scale."""
    choose, shares = mixed([1, 2, 5], 3, by_sample=True), np.array([1, 2, 5]) / 8
    counts = np.bincount([choose(n, 0, 0) for n in range(200_000)], minlength=3)
    expected = shares * 200_000
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # two degrees of freedom, one in a thousand


def test_neighbouring_samples_and_seeds_draw_independently():
    draws = [np.array([mixed([1, 1], seed, by_sample=True)(n, 0, 0) for n in range(50_000)]) for seed in (1, 2)]
    bound = 5 / np.sqrt(50_000)
    assert abs(np.corrcoef(draws[0], draws[1])[0, 1]) < bound
    assert abs(np.corrcoef(draws[0][:-1], draws[0][1:])[0, 1]) < bound


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(0, 200))
def test_periods_follow_one_another_for_ever(periods, step):
    order = [part for part, period in enumerate(periods) for _ in range(period)]
    assert alternating(periods)(0, 0, step) == order[step % len(order)]
