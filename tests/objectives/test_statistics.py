"""Ratios and shares at a million tokens, and masks that know nothing of each other.

Every test is keyed, so it cannot flake. Chi-square bounds are passed once in a thousand times by a sound generator.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.objectives import draw_u64, hash_key
from tests.objectives.common import BERT, MASKED, SELECTIONS, chi_square, chosen_by, limit, mlm

TOKENS = np.resize([51, 50, 51, 52, 50], 2_001)  # words of two tokens and of three
MILLION = 500  # sequences


def samples_of(name, ratio, **corruption):
    objective = MASKED[name](ratio, **corruption)
    for i in range(MILLION):
        sample = objective.make(TOKENS, hash_key(name, i))
        yield sample, chosen_by(name, sample)


@pytest.mark.parametrize("name", sorted(MASKED))
@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.4])
def test_the_bernoulli_ratio_is_what_was_asked_for(name, ratio):
    """Also at each position: every one is chosen in so many of the sequences."""
    counts = sum(chosen for _, chosen in samples_of(name, ratio))[name == "mntp" :]
    total, trials = counts.sum(), len(counts) * MILLION
    assert chi_square([total, trials - total], trials * np.array([ratio, 1 - ratio])) < limit(1)
    assert chi_square(counts, ratio * MILLION) / (1 - ratio) < limit(len(counts))


@pytest.mark.parametrize("name", sorted(MASKED))
@pytest.mark.parametrize("ratio", [0.15, 0.4])
def test_the_exact_count_falls_evenly_on_the_positions(name, ratio):
    chosen = np.array([chosen for _, chosen in samples_of(name, ratio, selection="exact")])[:, name == "mntp" :]
    places = chosen.shape[1]
    count = round(ratio * places)
    assert (chosen.sum(axis=1) == count).all()
    expected = MILLION * count / places
    assert chi_square(chosen.sum(axis=0), expected) / (1 - count / places) < limit(places - 1)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", sorted(MASKED))
def test_shares_are_what_was_asked_for(name, selection):
    """Of the chosen among 1e6 tokens: masked, drawn (96 ordinary tokens; by chance the same one), kept."""
    counts = np.zeros(3)
    for sample, chosen in samples_of(name, 0.5, selection=selection, **BERT):
        read, same = sample.inputs[chosen], TOKENS[:-1][chosen]
        counts += [(read == 1).sum(), ((read != 1) & (read != same)).sum(), (read == same).sum()]
    share = 0.1 * 95 / 96
    assert chi_square(counts, counts.sum() * np.array([0.8, share, 0.2 - share])) < limit(2)


def test_replacements_are_ordinary_tokens_drawn_evenly():
    counts = np.zeros(100)
    for sample, _ in samples_of("mlm", 1.0, mask=0.0, random=1.0):
        counts += np.bincount(sample.inputs, minlength=100)
    assert (counts[:4] == 0).all()
    assert chi_square(counts[4:], 1e6 / 96) < limit(95)


@given(st.integers(1, 200_000), st.floats(0.01, 1.0))
def test_capacity_is_static_and_rarely_passed(positions, ratio):
    assert positions * ratio <= mlm(ratio).capacity(positions) <= positions
    assert mlm(ratio).capacity(positions) == MASKED["mntp"](ratio).capacity(positions)


PARTS = ("seed", "mask seed", "source", "epoch", "sample")


@pytest.fixture(scope="module")
def texts():
    """500 sequences of 2,001 ordinary tokens in words of random lengths. Special ones would cut all spans alike."""
    return 4 + (draw_u64(hash_key("text"), MILLION * 2_001) % np.uint64(96)).astype(np.int64).reshape(MILLION, -1)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("part", range(5), ids=PARTS)
def test_neighbouring_masks_are_independent(part, selection, texts):
    """1e6 tokens under keys that differ by one in one part, made as `data.dataset` does: same text, other masks."""
    objective, masks = mlm(0.3, selection=selection), ([], [])
    for i, tokens in enumerate(texts):
        parts = [1234, 0, 0, 3, 2 * i]
        neighbour = [value + (place == part) for place, value in enumerate(parts)]
        for key, into in zip((parts, neighbour), masks, strict=True):
            into.append(objective.make(tokens, hash_key("mask", *key)).predicted)
    a, b = (np.array(rows) for rows in masks)
    assert not (a == b).all(axis=1).any()
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(1_000_000)


@pytest.mark.parametrize("stream", ["spans", "ratio", "prefix"])
def test_streams_beside_the_tokens_share_nothing_with_it(stream):
    key = hash_key("mask", 1234, 0, 0, 3, 7)
    a, b = draw_u64(key, 200_000), draw_u64(hash_key(stream, key), 200_000)
    assert len(np.intersect1d(a, b)) == 0
    assert abs(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]) < 5 / np.sqrt(200_000)
