"""Whole words: all of a word is hidden or none of it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Corruption, Mlm, Vocabulary, draw_u64, hash_key, threshold_u64
from tests.objectives.common import (
    KEYS,
    MASKED,
    RATIOS,
    SPECIAL,
    TOKENS,
    VOCABULARY,
    chi_square,
    chosen_by,
    limit,
    marks,
    mlm,
    mntp,
    words_of,
)


@given(TOKENS)
def test_marks_tell_where_words_begin(tokens):
    begins, words = marks().begins(tokens), words_of(tokens)
    special = np.isin(tokens, SPECIAL)
    assert begins[0]
    assert begins[special].all() and begins[1:][special[:-1]].all()
    same = (words[1:] == words[:-1]) & ~special[1:]
    assert (begins[1:] == ~same).all()


def test_marks_of_nothing():
    assert marks().begins(np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("name", sorted(MASKED))
@given(TOKENS, KEYS, RATIOS)
def test_a_word_is_hidden_whole_or_not_at_all(name, tokens, key, ratio):
    chosen = chosen_by(name, MASKED[name](ratio, selection="words").make(tokens, key))
    words = words_of(tokens[:-1])
    for word in set(words) - {-1}:
        assert len(set(chosen[words == word])) == 1


@given(TOKENS, KEYS, RATIOS)
def test_the_draw_of_a_word_is_that_of_its_first_token(tokens, key, ratio):
    read = tokens[:-1]
    words, draws = words_of(read), draw_u64(key, len(read))
    firsts = {word: int(np.flatnonzero(words == word)[0]) for word in set(words) - {-1}}
    expected = {word for word, first in firsts.items() if draws[first] <= threshold_u64(ratio)}
    if not expected and firsts:
        expected = {min(firsts, key=lambda word: draws[firsts[word]])}
    chosen = mlm(ratio, selection="words").make(tokens, key).predicted
    assert set(words[chosen]) == expected


@given(TOKENS, KEYS)
def test_mntp_spares_the_whole_first_word(tokens, key):
    read = tokens[:-1]
    words = words_of(read)
    inputs = mntp(1.0, selection="words").make(tokens, key).inputs
    first = words == words[0] if words[0] >= 0 else np.arange(len(read)) == 0
    assert (inputs[first] == read[first]).all()
    assert (inputs[~first & (words >= 0)] == VOCABULARY.mask_id).all()


@pytest.mark.parametrize("name", sorted(MASKED))
@pytest.mark.parametrize("ratio", [0.15, 0.4])
def test_words_are_hidden_at_the_ratio(name, ratio):
    """Chi-square over the words of 1e6 tokens, by their length: one to three tokens, and longer."""
    hits, counts = np.zeros(4), np.zeros(4)
    for i in range(500):
        tokens = 4 + (draw_u64(hash_key("text", i), 2_001) % np.uint64(96)).astype(np.int64)
        chosen = chosen_by(name, MASKED[name](ratio, selection="words").make(tokens, hash_key(i)))
        begins = np.flatnonzero(marks().begins(tokens[:-1]))[name == "mntp" :]  # its first word is spared
        lengths = np.diff(np.append(begins, 2_000)).clip(max=4) - 1
        counts += np.bincount(lengths, minlength=4)
        hits += np.bincount(lengths[chosen[begins]], minlength=4)
    assert chi_square(hits, ratio * counts) / (1 - ratio) < limit(4)


def test_a_tokenizer_without_words_is_refused():
    with pytest.raises(UserError, match="whose words can be told.*selection: exact or spans"):
        Corruption(Vocabulary(size=100, mask_id=1), selection="words")


@given(TOKENS, KEYS, RATIOS)
def test_a_special_token_that_the_marks_take_for_text_is_still_never_hidden(tokens, key, ratio):
    vocabulary = replace(VOCABULARY, special_ids=(*SPECIAL, 49))
    sample = Mlm(Corruption(vocabulary, selection="words"), ratio).make(tokens, key)
    assert not np.isin(tokens[:-1][sample.predicted], (*SPECIAL, 49)).any()
