"""Masked diffusion: each sequence has its own ratio."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Corruption, Diffusion, hash_key
from tests.objectives.common import KEYS, RATIOS, SELECTIONS, TOKENS, VOCABULARY, chi_square, limit, mlm


def diffusion(low, high, weighted=True, **corruption):
    return Diffusion(Corruption(VOCABULARY, **corruption), low, high, weighted)


@given(TOKENS, KEYS, st.tuples(RATIOS, RATIOS).map(sorted), st.booleans(), st.sampled_from(SELECTIONS))
def test_it_is_mlm_at_a_ratio_of_its_own(tokens, key, bounds, weighted, selection):
    """The draw of the ratio moves no other: the mask is that of an mlm sample with this ratio and key."""
    objective = diffusion(*bounds, weighted, selection=selection)
    ratio = objective.ratio(key)
    sample, plain = objective.make(tokens, key), mlm(ratio, selection=selection).make(tokens, key)
    assert bounds[0] <= ratio <= bounds[1]
    assert sample.predicted.tolist() == plain.predicted.tolist()
    assert sample.inputs.tolist() == plain.inputs.tolist()
    assert sample.weight == (1 / ratio if weighted else 1.0)


@pytest.mark.parametrize(("low", "high"), [(0.001, 1.0), (0.2, 0.6)])
def test_ratios_are_uniform(low, high):
    """Chi-square of 2e4 ratios in 20 bins."""
    ratios = [diffusion(low, high).ratio(hash_key(i)) for i in range(20_000)]
    counts, _ = np.histogram(ratios, bins=20, range=(low, high))
    assert counts.sum() == 20_000
    assert chi_square(counts, 1_000) < limit(19)


def test_a_sequence_is_masked_at_its_ratio():
    """Over 1e6 tokens: squared deviations, each in units of its own variance."""
    objective, tokens, deviations = diffusion(0.05, 0.95), np.full(1_001, 50), []
    for i in range(1_000):
        ratio = objective.ratio(hash_key(i))
        masked = objective.make(tokens, hash_key(i)).predicted.sum()
        deviations.append((masked - 1_000 * ratio) / np.sqrt(1_000 * ratio * (1 - ratio)))
    assert np.square(deviations).sum() < limit(1_000)
    assert abs(np.mean(deviations)) < 5 / np.sqrt(1_000)


def test_the_ratio_is_drawn_apart_from_the_tokens():
    """Each of 64 positions is chosen as often as the ratios say: none shares its draw with the ratio."""
    objective, tokens = diffusion(0.001, 1.0), np.full(65, 50)
    ratios = np.array([objective.ratio(hash_key(i)) for i in range(5_000)])
    counts = sum(objective.make(tokens, hash_key(i)).predicted for i in range(5_000))
    deviations = (counts - ratios.sum()) / np.sqrt((ratios * (1 - ratios)).sum())
    assert np.square(deviations).sum() < limit(64)


@given(st.integers(1, 200_000), RATIOS)
def test_capacity_is_a_quarter_of_the_largest(positions, high):
    capacity = diffusion(high / 2, high).capacity(positions)
    assert capacity == positions or (capacity % 64 == 0 and 0 <= capacity - positions * high / 4 < 64)
    assert capacity <= positions


@pytest.mark.parametrize("bounds", [(0.0, 0.5), (0.6, 0.5), (0.5, 1.1), (-0.1, 0.5)])
def test_bounds_that_are_none_are_refused(bounds):
    with pytest.raises(UserError, match="diffusion needs 0 < low <= high <= 1"):
        diffusion(*bounds)
