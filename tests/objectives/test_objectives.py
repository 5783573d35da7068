"""What clm and mlm predict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Clm, Corruption, Mlm, Mntp, Vocabulary, hash_key

VOCABULARY = Vocabulary(size=100, mask_id=1, special_ids=(0, 1, 2, 3))
BERT = {"mask": 0.8, "random": 0.1, "keep": 0.1}
TOKENS = st.lists(st.integers(0, 99), min_size=2, max_size=300).map(lambda ids: np.array(ids, dtype=np.int64))


KEYS = st.integers(0, 2**128 - 1)


def mlm(ratio: float, **shares) -> Mlm:
    return Mlm(Corruption(VOCABULARY, **shares), ratio)


@given(TOKENS)
def test_clm_predicts_every_next_token(tokens):
    sample = Clm().make(tokens, key=0)
    assert sample.inputs.tolist() == tokens[:-1].tolist()
    assert sample.labels.tolist() == tokens[1:].tolist()
    assert sample.predicted.all()


@given(TOKENS, st.floats(0.01, 1.0), st.integers(0, 2**128 - 1))
def test_mlm_hides_what_it_predicts_and_nothing_else(tokens, ratio, key):
    sample = mlm(ratio).make(tokens, key)
    assert sample.labels.tolist() == tokens[:-1].tolist()
    assert (sample.inputs[sample.predicted] == VOCABULARY.mask_id).all()
    assert (sample.inputs[~sample.predicted] == sample.labels[~sample.predicted]).all()


@given(TOKENS, st.integers(0, 2**128 - 1))
def test_mlm_never_predicts_a_special_token_and_always_something(tokens, key):
    sample = mlm(0.01).make(tokens, key)
    ordinary = tokens[:-1] > 3
    assert not sample.predicted[~ordinary].any()
    assert sample.predicted.any() == ordinary.any()


@given(TOKENS, st.integers(0, 2**128 - 1))
def test_mlm_is_a_function_of_tokens_and_key(tokens, key):
    once, again = (mlm(0.4).make(tokens.copy(), key) for _ in range(2))
    assert once.inputs.tolist() == again.inputs.tolist()


def test_a_larger_ratio_hides_more_of_the_same_tokens():
    """One draw per token decides for every ratio: runs that differ in ratio only have nested masks."""
    tokens = np.arange(4, 100)
    small, large = (mlm(ratio).make(tokens, key=11).predicted for ratio in (0.2, 0.5))
    assert (small <= large).all()


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.4])
def test_the_ratio_is_what_was_asked_for(ratio):
    """Within five standard deviations of 1e6 ordinary tokens."""
    tokens = np.full(1_001, 50, dtype=np.int64)
    masked = sum(mlm(ratio).make(tokens, hash_key(i)).predicted.sum() for i in range(1_000))
    assert abs(masked - ratio * 1e6) < 5 * np.sqrt(ratio * (1 - ratio) * 1e6)


@settings(deadline=None)
@given(st.integers(1, 200_000), st.floats(0.01, 1.0))
def test_capacity_is_static_and_rarely_passed(positions, ratio):
    capacity = mlm(ratio).capacity(positions)
    assert positions * ratio <= capacity <= positions
    assert Clm().capacity(positions) == positions


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(UserError, match=r"not in \(0, 1\]"):
        mlm(ratio)


def test_mlm_without_a_mask_token_is_refused():
    with pytest.raises(UserError, match="no mask token"):
        Corruption(Vocabulary(size=100))


@given(TOKENS, KEYS, st.floats(0.01, 1.0), st.sampled_from(["bernoulli", "exact"]))
def test_mntp_predicts_what_mlm_would_hide_one_position_earlier(tokens, key, ratio, selection):
    sample = Mntp(Corruption(VOCABULARY, selection=selection), ratio).make(tokens, key)
    read = tokens[:-1]
    hidden = sample.inputs != read
    places = np.flatnonzero(sample.predicted)
    assert (sample.labels[places] == tokens[places + 1]).all()
    assert (sample.inputs[places + 1] == VOCABULARY.mask_id).all()
    assert set(np.flatnonzero(hidden)) == set(places + 1)
    assert sample.inputs[0] == read[0]
    assert not sample.predicted[-1]


@given(TOKENS, KEYS)
def test_shares_do_not_change_which_tokens_are_chosen(tokens, key):
    plain, bert = mlm(0.4).make(tokens, key), mlm(0.4, **BERT).make(tokens, key)
    assert plain.predicted.tolist() == bert.predicted.tolist()
    assert (bert.inputs[~bert.predicted] == bert.labels[~bert.predicted]).all()


def test_shares_are_what_was_asked_for():
    """Chi-square over 1e6 chosen tokens: masked, random (and not by chance the token itself), kept."""
    tokens, counts = np.full(1_001, 50, dtype=np.int64), np.zeros(3)
    ordinary = 96
    for i in range(1_000):
        sample = mlm(1.0, **BERT).make(tokens, hash_key(i))
        drawn = sample.inputs[sample.predicted]
        counts += [(drawn == 1).sum(), ((drawn != 1) & (drawn != 50)).sum(), (drawn == 50).sum()]
    share = 0.1 * (ordinary - 1) / ordinary
    expected = 1e6 * np.array([0.8, share, 0.2 - share])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # two degrees of freedom, one in a thousand


def test_replacements_are_ordinary_tokens_drawn_evenly():
    tokens, counts = np.full(1_001, 50, dtype=np.int64), np.zeros(100)
    for i in range(1_000):
        sample = mlm(1.0, mask=0.0, random=1.0).make(tokens, hash_key("even", i))
        counts += np.bincount(sample.inputs, minlength=100)
    assert (counts[:4] == 0).all()
    expected = 1e6 / 96
    assert ((counts[4:] - expected) ** 2 / expected).sum() < 143  # 95 degrees of freedom, one in a thousand


@given(TOKENS, KEYS, st.floats(0.01, 1.0))
def test_exact_selection_chooses_the_rounded_count(tokens, key, ratio):
    sample = mlm(ratio, selection="exact").make(tokens, key)
    ordinary = int((tokens[:-1] > 3).sum())
    assert sample.predicted.sum() == (max(1, round(ratio * ordinary)) if ordinary else 0)
    assert not sample.predicted[tokens[:-1] <= 3].any()


@pytest.mark.parametrize("shares", [{"mask": 0.5}, {"mask": 1.1, "keep": -0.1}, {"random": 0.1}])
def test_shares_that_do_not_sum_to_one_are_refused(shares):
    with pytest.raises(UserError, match="must sum to 1"):
        mlm(0.4, **shares)
