"""Which phase a sample belongs to."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.attention import Pattern
from megatron_mlmclm.objectives import Clm
from megatron_mlmclm.phases import Phase, Timeline, View

VIEW = View("clm", Clm(), Pattern("causal"))
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def laid(lengths: list[int]) -> Timeline:
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    phases = zip(firsts, lengths, strict=True)
    return Timeline([Phase(i, str(i), (VIEW,), first, samples) for i, (first, samples) in enumerate(phases)])


@given(LENGTHS)
def test_every_sample_has_the_phase_that_holds_it(lengths):
    timeline = laid(lengths)
    expected = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert [timeline.at(n).ordinal for n in range(timeline.end)] == expected
    assert timeline.at(timeline.end + 10).ordinal == len(lengths) - 1


@given(LENGTHS, LENGTHS)
def test_more_phases_leave_the_first_samples_as_they_were(lengths, more):
    short = laid(lengths)
    long = laid([*lengths, *more])
    assert [short.at(n) for n in range(short.end)] == [long.at(n) for n in range(short.end)]
