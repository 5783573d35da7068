"""Invariant 2: draws are functions of their key, and neighbouring keys share nothing."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.objectives import draw_u64, hash_key, threshold_u64

PARTS = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=8)), min_size=1, max_size=5)


@given(PARTS, PARTS)
def test_different_parts_give_different_keys(a, b):
    assert (hash_key(*a) == hash_key(*b)) == (a == b)


def test_the_stream_of_a_key_is_pinned():
    """Masks of finished runs must come out the same after any upgrade."""
    assert hash_key("mask", 1234, 0, 0, 0, 7) == 224731424531830718640347578972732223292
    assert draw_u64(5, 3).tolist() == [13535223855206698129, 10893183200674769480, 3833398344621921443]


def test_a_part_whose_text_may_change_is_refused():
    """numpy prints its integers as `np.int64(3)`: the same number would be another key."""
    with pytest.raises(TypeError, match="int64"):
        hash_key("mask", np.int64(3))


def test_a_longer_draw_begins_with_the_shorter_one():
    assert draw_u64(9, 100)[:10].tolist() == draw_u64(9, 10).tolist()


def test_the_stream_is_numpys_philox_from_any_word_on():
    """Whatever was drawn before, by whichever thread."""
    for key in (0, 9, 2**64, 2**128 - 1):
        words = np.random.Philox(key=key).random_raw(40).tolist()
        for start in range(9):
            assert draw_u64(key, 17, start).tolist() == words[start : start + 17]
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda key: draw_u64(key, 5000).sum(), [*range(50)] * 4))
    assert drawn == [draw_u64(key, 5000).sum() for key in range(50)] * 4


@pytest.mark.parametrize("position", range(5))
def test_neighbouring_keys_are_independent(position):
    """1e6 draws each: no common word, and no correlation beyond chance, whichever part of the key differs by one."""
    parts = [1234, 0, 0, 3, 7]
    neighbour = [part + (i == position) for i, part in enumerate(parts)]
    a, b = (draw_u64(hash_key("mask", *key), 1_000_000) for key in (parts, neighbour))
    assert len(np.intersect1d(a, b)) == 0
    correlation = np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]
    assert abs(correlation) < 5 / np.sqrt(1_000_000)


@pytest.mark.parametrize("probability", [1e-3, 0.15, 0.4, 1.0])
def test_the_threshold_is_met_with_the_probability(probability):
    hits = (draw_u64(3, 1_000_000) <= threshold_u64(probability)).mean()
    assert abs(hits - probability) < 5 * np.sqrt(probability * (1 - probability) / 1_000_000) + 1e-12
