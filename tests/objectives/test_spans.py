"""Spans: an exact budget in pieces of geometric length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Corruption, Mlm, draw_u64, hash_key
from megatron_mlmclm.objectives.spans import draw_lengths, length_thresholds
from tests.objectives.common import KEYS, MASKED, RATIOS, TOKENS, VOCABULARY, chi_square, chosen_by, limit, mlm

LENGTHS = [(3.0, 10), (3.8, 10), (1.0, 10), (1.0, 1), (5.0, 6), (10.0, 10), (2.5, 40)]


@pytest.mark.parametrize("name", sorted(MASKED))
@given(TOKENS, KEYS, RATIOS)
def test_the_budget_is_met_exactly(name, tokens, key, ratio):
    may = tokens[:-1] > 3
    may[:1] &= name != "mntp"
    ordinary = int(may.sum())
    predicted = MASKED[name](ratio, selection="spans").make(tokens, key).predicted
    assert predicted.sum() == (max(1, round(ratio * ordinary)) if ordinary else 0)


@given(TOKENS, KEYS, RATIOS, st.sampled_from(LENGTHS))
def test_spans_are_laid_as_the_rule_says(tokens, key, ratio, lengths):
    """The same by the slowest and plainest code."""
    mean, longest = lengths
    read = tokens[:-1]
    draws, order = draw_u64(key, len(read)), [place for place in range(len(read)) if read[place] > 3]
    budget = max(1, round(ratio * len(order))) if order else 0
    order.sort(key=lambda place: draws[place])
    chosen: set[int] = set()
    for start, length in zip(order, draw_lengths(key, len(order), length_thresholds(mean, longest)), strict=True):
        for place in range(start, start + length):
            if place >= len(read) or read[place] <= 3 or place in chosen or len(chosen) == budget:
                break
            chosen.add(place)
    objective = mlm(ratio, selection="spans", span_mean=mean, span_max=longest)
    assert set(np.flatnonzero(objective.make(tokens, key).predicted)) == chosen


@pytest.mark.parametrize(("mean", "longest"), LENGTHS)
def test_lengths_are_clipped_geometric_with_the_mean_asked_for(mean, longest):
    """Chi-square of 1e6 drawn lengths, against a law found here from its mean by another way: a fine grid."""
    lengths = draw_lengths(hash_key("lengths"), 1_000_000, length_thresholds(mean, longest))
    assert lengths.min() >= 1 and lengths.max() <= longest
    deviation = lengths.std() / 1_000
    assert abs(lengths.mean() - mean) < 5 * deviation + 1e-9
    keep = np.linspace(0.0, 1.0, 200_001)
    keep = keep[np.argmin(np.abs(sum(keep**k for k in range(longest)) - mean))]
    law = np.array([keep ** (k - 1) * (1 - keep if k < longest else 1) for k in range(1, longest + 1)])
    seen = law * 1e6 > 5
    counts = np.bincount(lengths, minlength=longest + 1)[1:]
    assert chi_square(counts[seen], 1e6 * law[seen]) < limit(max(1, seen.sum() - 1))


def test_hidden_spans_are_as_long_as_asked_for():
    """At a small ratio few spans meet: what is seen in the masks is the law again, up to runs that touch."""
    objective, tokens, runs, hidden = mlm(0.01, selection="spans", span_mean=4.0), np.full(2_001, 50), 0, 0
    for i in range(500):
        chosen = objective.make(tokens, hash_key(i)).predicted
        hidden += chosen.sum()
        runs += (np.diff(chosen.astype(int), prepend=0) == 1).sum()
    assert hidden == 500 * 20
    assert abs(hidden / runs - 4.0) < 0.4  # the last one is cut


def test_the_budget_is_met_at_a_million_tokens():
    tokens = np.full(2_001, 50)
    for name in MASKED:
        for ratio in (0.15, 0.4):
            objective = MASKED[name](ratio, selection="spans")
            counts = {int(chosen_by(name, objective.make(tokens, hash_key(i))).sum()) for i in range(500)}
            assert counts == {round(ratio * (2_000 - (name == "mntp")))}


@pytest.mark.parametrize(("mean", "longest"), [(0.5, 10), (11.0, 10), (1.0, 0)])
def test_lengths_that_cannot_be_are_refused(mean, longest):
    with pytest.raises(UserError, match="span_mean .* is not between 1 and span_max"):
        Mlm(Corruption(VOCABULARY, selection="spans", span_mean=mean, span_max=longest), 0.15)
