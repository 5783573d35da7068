"""Causal modelling, with and without a prefix that is seen in full; and pseudo-likelihood."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Clm, PseudoLikelihood, Vocabulary, hash_key
from tests.objectives.common import KEYS, SPECIAL, TOKENS, VOCABULARY, chi_square, limit

SHARES = st.tuples(st.floats(0.001, 0.999), st.floats(0.001, 0.999)).map(lambda pair: tuple(sorted(pair)))


@given(TOKENS, KEYS)
def test_clm_predicts_every_next_token(tokens, key):
    sample = Clm().make(tokens, key)
    assert sample.inputs.tolist() == tokens[:-1].tolist()
    assert sample.labels.tolist() == tokens[1:].tolist()
    assert sample.predicted.all()
    assert (sample.prefix, sample.weight) == (0, 1.0)


@given(TOKENS, KEYS, SHARES)
def test_a_label_in_sight_is_never_predicted_and_every_other_is(tokens, key, shares):
    """Position i sees i and what is before it and, inside the prefix, all of the prefix; its label stands at i + 1."""
    sample = Clm(shares).make(tokens, key)
    positions = len(tokens) - 1
    for i in range(positions):
        seen = max(i + 1, sample.prefix) if i < sample.prefix else i + 1
        assert sample.predicted[i] == (i + 1 >= seen)
    assert sample.labels.tolist() == tokens[1:].tolist()
    assert sample.inputs.tolist() == tokens[:-1].tolist()


@given(st.integers(2, 3_000), KEYS, SHARES)
def test_a_prefix_is_within_its_shares(positions, key, shares):
    prefix = Clm(shares).make(np.zeros(positions + 1, dtype=np.int64), key).prefix
    assert 1 <= prefix <= positions - 1
    assert round(shares[0] * positions) <= max(prefix, 1) or prefix == positions - 1
    assert prefix <= max(1, round(shares[1] * positions))


@pytest.mark.parametrize("shares", [(0.2, 0.7), (0.01, 0.99)])
def test_prefixes_are_uniform(shares):
    """Chi-square of 1e4 prefixes of 1e4 tokens, in 20 bins."""
    tokens = np.zeros(10_001, dtype=np.int64)
    prefixes = [Clm(shares).make(tokens, hash_key(i)).prefix for i in range(10_000)]
    counts, _ = np.histogram(prefixes, bins=20, range=(1e4 * shares[0], 1e4 * shares[1]))
    assert chi_square(counts, 500) < limit(19)


def test_one_position_has_no_prefix():
    sample = Clm((0.5, 0.5)).make(np.array([7, 8]), key=0)
    assert (sample.prefix, sample.predicted.tolist()) == (0, [True])


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.6, 0.5), (0.5, 1.0)])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(UserError, match="with 0 < low <= high < 1"):
        Clm(shares)


@given(TOKENS, KEYS)
def test_pll_hides_one_token_at_a_time_and_over_the_steps_every_ordinary_one(tokens, key):
    read, objective = tokens[:-1], PseudoLikelihood(VOCABULARY)
    for step in range(len(read)):
        sample = objective.make(tokens, key, step)
        expected = (np.arange(len(read)) == step) & ~np.isin(read, SPECIAL)
        assert sample.predicted.tolist() == expected.tolist()
        assert sample.inputs.tolist() == np.where(expected, VOCABULARY.mask_id, read).tolist()
        assert sample.labels.tolist() == read.tolist()


def test_pll_past_the_sequence_is_an_error():
    with pytest.raises(IndexError):
        PseudoLikelihood(VOCABULARY).make(np.arange(10, 20), 0, step=9)


def test_pll_needs_a_mask_token():
    with pytest.raises(UserError, match="no mask token"):
        PseudoLikelihood(Vocabulary(size=100))


@given(st.integers(1, 200_000))
def test_capacities(positions):
    assert Clm().capacity(positions) == Clm((0.1, 0.9)).capacity(positions) == positions
    assert PseudoLikelihood(VOCABULARY).capacity(positions) == min(positions, 64)
