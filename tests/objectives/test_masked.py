"""What holds for every masked objective under every selection."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Corruption, Ramp, Vocabulary, draw_u64, hash_key
from tests.objectives.common import (
    BERT,
    KEYS,
    MASKED,
    RATIOS,
    SELECTIONS,
    SPECIAL,
    TOKENS,
    VOCABULARY,
    chosen_by,
    mlm,
    mntp,
    words_of,
)

NAMES = st.sampled_from(sorted(MASKED))
SELECTION = st.sampled_from(SELECTIONS)


def eligible_of(name, selection, tokens):
    """What may be chosen, bool [S]."""
    eligible = ~np.isin(tokens, SPECIAL)
    if name == "mntp":
        words = words_of(tokens)
        eligible &= words != words[0] if selection == "words" else np.arange(len(tokens)) > 0
    return eligible


@given(NAMES, SELECTION, TOKENS, KEYS, RATIOS)
def test_ordinary_tokens_are_predicted_and_always_at_least_one(name, selection, tokens, key, ratio):
    read = tokens[:-1]
    sample = MASKED[name](ratio, selection=selection).make(tokens, key)
    eligible, chosen = eligible_of(name, selection, read), chosen_by(name, sample)
    assert not (chosen & ~eligible).any()
    assert chosen.any() == eligible.any() == sample.predicted.any()
    assert (sample.labels[sample.predicted] == read[chosen]).all()


@given(NAMES, SELECTION, TOKENS, KEYS, RATIOS)
def test_all_that_is_predicted_is_hidden_and_nothing_else(name, selection, tokens, key, ratio):
    sample = MASKED[name](ratio, selection=selection).make(tokens, key)
    chosen = chosen_by(name, sample)
    assert (sample.inputs == np.where(chosen, VOCABULARY.mask_id, tokens[:-1])).all()


@given(NAMES, SELECTION, TOKENS, KEYS, RATIOS)
def test_shares_change_what_is_read_and_not_what_is_chosen(name, selection, tokens, key, ratio):
    plain, bert = (MASKED[name](ratio, selection=selection, **shares).make(tokens, key) for shares in ({}, BERT))
    chosen = chosen_by(name, bert)
    assert plain.predicted.tolist() == bert.predicted.tolist()
    assert (bert.inputs[~chosen] == tokens[:-1][~chosen]).all()
    drawn = bert.inputs[chosen]
    assert not np.isin(drawn[drawn != VOCABULARY.mask_id], SPECIAL).any()


@given(NAMES, SELECTION, TOKENS, KEYS, RATIOS, st.integers(0, 9))
def test_a_sample_is_a_function_of_tokens_key_and_step(name, selection, tokens, key, ratio, step):
    once, again = (MASKED[name](ratio, selection=selection, **BERT).make(tokens.copy(), key, step) for _ in range(2))
    assert (once.inputs == again.inputs).all() and (once.labels == again.labels).all()
    assert (once.predicted == again.predicted).all() and once.weight == again.weight


@given(NAMES, SELECTION, TOKENS, KEYS, RATIOS, RATIOS)
def test_a_larger_ratio_chooses_the_same_tokens_and_more(name, selection, tokens, key, one, other):
    """Runs that differ in ratio only have nested masks."""
    small, large = (MASKED[name](r, selection=selection).make(tokens, key) for r in sorted((one, other)))
    assert (small.predicted <= large.predicted).all()


@given(TOKENS, KEYS, RATIOS)
def test_exact_selection_chooses_the_rounded_count(tokens, key, ratio):
    ordinary = int((tokens[:-1] > 3).sum())
    predicted = mlm(ratio, selection="exact").make(tokens, key).predicted
    assert predicted.sum() == (max(1, round(ratio * ordinary)) if ordinary else 0)


@given(st.sampled_from([mlm, mntp]), TOKENS, KEYS, st.integers(0, 20))
def test_the_step_decides_the_ratio(make, tokens, key, step):
    ramp = Ramp(0.9, 0.1, steps=10)
    moving, still = make(ramp).make(tokens, key, step), make(ramp.at(step)).make(tokens, key)
    assert moving.predicted.tolist() == still.predicted.tolist()
    assert make(ramp).capacity(10_000) == make(0.9).capacity(10_000)


# (name, ratio, selection, BERT's shares): predicted tokens, and checksums of `predicted` and `inputs`. The masks of
# finished runs must come out the same after any upgrade. `predicted` was never made anew; `inputs` under BERT's shares
# once, before the first release, when kind and replacement came to share a word.
PINNED = {
    ("mlm", 0.15, "bernoulli", False): (34, 2699421463, 2757137622),
    ("mlm", 0.4, "bernoulli", True): (107, 1898846743, 3082936407),
    ("mlm", 0.15, "exact", False): (44, 2692010827, 3451094737),
    ("mlm", 0.4, "exact", True): (116, 220435106, 3998633617),
    ("mlm", 1e-09, "bernoulli", False): (1, 227076279, 2145996358),
    ("mntp", 0.15, "bernoulli", False): (33, 3842252089, 3136329177),
    ("mntp", 0.4, "bernoulli", True): (106, 3855996612, 312593763),
    ("mntp", 0.15, "exact", False): (44, 504476125, 4025182941),
    ("mntp", 0.4, "exact", True): (116, 1002809097, 538204210),
    ("mntp", 1e-09, "bernoulli", False): (1, 2287248994, 2145996358),
}


@pytest.mark.parametrize("case", PINNED)
def test_masks_are_pinned(case):
    name, ratio, selection, bert = case
    tokens = (draw_u64(hash_key("pin"), 301) % np.uint64(100)).astype(np.int64)
    objective = MASKED[name](ratio, selection=selection, **(BERT if bert else {}))
    sample = objective.make(tokens, hash_key("mask", 1234, 0, 0, 0, 7))
    sums = (zlib.crc32(array.tobytes()) for array in (sample.predicted, sample.inputs.astype("<i8")))
    assert (sample.predicted.sum(), *sums) == PINNED[case]


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(UserError, match=r"mask_ratio .* is not in \(0, 1\]"):
        mlm(ratio)


def test_a_tokenizer_without_a_mask_token_is_refused():
    with pytest.raises(UserError, match="no mask token"):
        Corruption(Vocabulary(size=100))


@pytest.mark.parametrize("shares", [{"mask": 0.5}, {"mask": 1.1, "keep": -0.1}, {"random": 0.1}])
def test_shares_that_do_not_sum_to_one_are_refused(shares):
    with pytest.raises(UserError, match="must sum to 1"):
        mlm(0.4, **shares)


def test_an_unknown_selection_is_refused():
    with pytest.raises(UserError, match="selection 'span' is not one of bernoulli, exact, words, spans"):
        mlm(0.4, selection="span")
