"""A small vocabulary with words, strategies, and the chi-square bound that the tests of this folder share."""

import numpy as np
from hypothesis import strategies as st

from megatron_mlmclm.objectives import Corruption, Diffusion, Mlm, Mntp, Vocabulary, WordMarks

SPECIAL = (0, 1, 2, 3)
BERT = {"mask": 0.8, "random": 0.1, "keep": 0.1}
SELECTIONS = ("bernoulli", "exact", "words", "spans")
KEYS = st.integers(0, 2**128 - 1)
TOKENS = st.lists(st.integers(0, 99), min_size=2, max_size=300).map(lambda ids: np.array(ids, dtype=np.int64))
RATIOS = st.floats(0.01, 1.0)


def marks() -> WordMarks:
    """Of 100 ids every third begins a word, and special ones stand alone."""
    ids = np.arange(100)
    return WordMarks.of(np.zeros(100, dtype=int), ids % 3 == 0, np.array([[False, True]]), np.isin(ids, SPECIAL))


VOCABULARY = Vocabulary(size=100, mask_id=1, special_ids=SPECIAL, words=marks())


def mlm(ratio, **corruption) -> Mlm:
    return Mlm(Corruption(VOCABULARY, **corruption), ratio)


def mntp(ratio, **corruption) -> Mntp:
    return Mntp(Corruption(VOCABULARY, **corruption), ratio)


def diffusion(ratio, **corruption) -> Diffusion:
    """One that always draws the same ratio."""
    return Diffusion(Corruption(VOCABULARY, **corruption), ratio, ratio, weighted=True)


MASKED = {"mlm": mlm, "mntp": mntp, "diffusion": diffusion}


def chosen_by(name: str, sample) -> np.ndarray:
    """Which tokens were chosen, bool [S]: mntp predicts each one position earlier."""
    return np.append(False, sample.predicted[:-1]) if name == "mntp" else sample.predicted


def words_of(tokens) -> np.ndarray:
    """The number of each token's word, int [S], by a plain loop; special tokens have -1."""
    numbers, count = [], -1
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if place else 0
        count += token in SPECIAL or before in SPECIAL or token % 3 == 0
        numbers.append(-1 if token in SPECIAL else count)
    return np.array(numbers)


def chi_square(counts, expected) -> float:
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


def limit(freedom: int) -> float:
    """What chi-square with so many degrees of freedom passes once in a thousand times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
