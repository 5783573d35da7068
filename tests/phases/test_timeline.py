"""Which phase a sample belongs to."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.attention import Pattern
from megatron_mlmclm.objectives import Clm
from megatron_mlmclm.phases import Timeline, View

VIEW = View(Clm(), Pattern("causal"))
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(LENGTHS)
def test_every_sample_has_the_phase_that_holds_it(lengths):
    timeline = Timeline.of([(str(i), VIEW, length) for i, length in enumerate(lengths)])
    expected = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert [timeline.at(n).ordinal for n in range(timeline.samples)] == expected
    assert timeline.at(timeline.samples + 10).ordinal == len(lengths) - 1


@given(LENGTHS, LENGTHS)
def test_more_phases_leave_the_first_samples_as_they_were(lengths, more):
    short = Timeline.of([(str(i), VIEW, length) for i, length in enumerate(lengths)])
    long = Timeline.of([(str(i), VIEW, length) for i, length in enumerate([*lengths, *more])])
    assert [short.at(n) for n in range(short.samples)] == [long.at(n) for n in range(short.samples)]
