"""What clm and mlm predict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Clm, Mlm, Vocabulary, hash_key

VOCABULARY = Vocabulary(size=100, mask_id=1, special_ids=(0, 1, 2, 3))
TOKENS = st.lists(st.integers(0, 99), min_size=2, max_size=300).map(lambda ids: np.array(ids, dtype=np.int64))


@given(TOKENS)
def test_clm_predicts_every_next_token(tokens):
    sample = Clm().make(tokens, key=0)
    assert sample.inputs.tolist() == tokens[:-1].tolist()
    assert sample.labels.tolist() == tokens[1:].tolist()
    assert sample.predicted.all()


@given(TOKENS, st.floats(0.01, 1.0), st.integers(0, 2**128 - 1))
def test_mlm_hides_what_it_predicts_and_nothing_else(tokens, ratio, key):
    sample = Mlm(VOCABULARY, ratio).make(tokens, key)
    assert sample.labels.tolist() == tokens[:-1].tolist()
    assert (sample.inputs[sample.predicted] == VOCABULARY.mask_id).all()
    assert (sample.inputs[~sample.predicted] == sample.labels[~sample.predicted]).all()


@given(TOKENS, st.integers(0, 2**128 - 1))
def test_mlm_never_predicts_a_special_token_and_always_something(tokens, key):
    sample = Mlm(VOCABULARY, 0.01).make(tokens, key)
    ordinary = tokens[:-1] > 3
    assert not sample.predicted[~ordinary].any()
    assert sample.predicted.any() == ordinary.any()


@given(TOKENS, st.integers(0, 2**128 - 1))
def test_mlm_is_a_function_of_tokens_and_key(tokens, key):
    once, again = (Mlm(VOCABULARY, 0.4).make(tokens.copy(), key) for _ in range(2))
    assert once.inputs.tolist() == again.inputs.tolist()


def test_a_larger_ratio_hides_more_of_the_same_tokens():
    """One draw per token decides for every ratio: runs that differ in ratio only have nested masks."""
    tokens = np.arange(4, 100)
    small, large = (Mlm(VOCABULARY, ratio).make(tokens, key=11).predicted for ratio in (0.2, 0.5))
    assert (small <= large).all()


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.4])
def test_the_ratio_is_what_was_asked_for(ratio):
    """Within five standard deviations of 1e6 ordinary tokens."""
    tokens = np.full(1_001, 50, dtype=np.int64)
    masked = sum(Mlm(VOCABULARY, ratio).make(tokens, hash_key(i)).predicted.sum() for i in range(1_000))
    assert abs(masked - ratio * 1e6) < 5 * np.sqrt(ratio * (1 - ratio) * 1e6)


@settings(deadline=None)
@given(st.integers(1, 200_000), st.floats(0.01, 1.0))
def test_capacity_is_static_and_rarely_passed(positions, ratio):
    capacity = Mlm(VOCABULARY, ratio).capacity(positions)
    assert positions * ratio <= capacity <= positions
    assert Clm().capacity(positions) == positions


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(UserError, match=r"not in \(0, 1\]"):
        Mlm(VOCABULARY, ratio)


def test_mlm_without_a_mask_token_is_refused():
    with pytest.raises(UserError, match="no mask token"):
        Mlm(Vocabulary(size=100), 0.4)
