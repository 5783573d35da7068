"""Masking ratios as functions of the step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Constant, Ramp, Steps, as_ratio

RATIO = st.floats(1e-6, 1.0)
RAMPS = st.builds(Ramp, RATIO, RATIO, st.integers(1, 60), st.sampled_from(["linear", "cosine"]))
TABLES = st.dictionaries(st.integers(1, 60), RATIO, max_size=5).flatmap(
    lambda table: RATIO.map(lambda first: Steps({**table, 0: first}))
)
RATIOS = st.one_of(st.builds(Constant, RATIO), RAMPS, TABLES)


@given(RATIOS, st.integers(1, 120))
def test_the_mean_is_that_of_every_step(ratio, steps):
    assert ratio.mean(steps) == pytest.approx(np.mean([ratio.at(step) for step in range(steps)]))


@given(RATIOS, st.integers(0, 10**9))
def test_no_step_passes_the_largest_and_all_are_ratios(ratio, step):
    assert 0.0 < ratio.at(step) <= ratio.largest <= 1.0


@given(RAMPS, st.integers(0, 100))
def test_a_ramp_goes_from_its_start_to_its_end_and_stays(ramp, further):
    last = ramp.steps - 1
    assert ramp.at(0) == (ramp.start if last else ramp.end)
    assert ramp.at(last + further) == ramp.end
    path = np.diff([ramp.at(step) for step in range(ramp.steps)])
    assert (path * np.sign(ramp.end - ramp.start) >= -1e-15).all()  # but for rounding


def test_rounding_leads_nowhere_outside_the_ends():
    """(1 - x) * 0.3 + x * 0.3 is not 0.3 for every x."""
    ramp = Ramp(0.3, 0.3, steps=1_000)
    assert {ramp.at(step) for step in range(1_000)} == {0.3}


def test_half_way():
    assert Ramp(0.1, 0.5, steps=11).at(5) == pytest.approx(0.3)
    assert Ramp(0.1, 0.5, steps=11, curve="cosine").at(5) == pytest.approx(0.3)
    assert Ramp(0.1, 0.5, steps=13).at(3) == pytest.approx(0.2)
    assert Ramp(0.1, 0.5, steps=13, curve="cosine").at(3) == pytest.approx(0.1 + 0.4 * (1 - np.sqrt(0.5)) / 2)


def test_a_table_holds_each_ratio_from_its_step_on():
    table = Steps({100: 0.2, 0: 0.4, 250: 0.15})
    assert [table.at(step) for step in (0, 99, 100, 249, 250, 10**6)] == [0.4, 0.4, 0.2, 0.2, 0.15, 0.15]
    assert table.largest == 0.4


def test_a_number_is_a_constant():
    assert as_ratio(0.4) == Constant(0.4)
    assert as_ratio(1) == Constant(1.0)
    ramp = Ramp(0.4, 0.2, 10)
    assert as_ratio(ramp) is ramp


def test_the_mean_of_a_long_phase_is_exact():
    assert Ramp(0.2, 0.4, 100_000).mean(100_000) == pytest.approx(0.3, abs=1e-12)
    assert Ramp(0.2, 0.4, 100_000).mean(200_000) == pytest.approx(0.35, abs=1e-12)
    assert Ramp(0.4, 0.2, 100_000, "cosine").mean(50_000) == pytest.approx(0.3 + 0.2 / np.pi, abs=1e-5)


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.1, float("nan")])
def test_a_ratio_outside_its_range_is_refused(wrong):
    for make in (lambda: Constant(wrong), lambda: Ramp(0.4, wrong, 9), lambda: Ramp(wrong, 0.4, 9)):
        with pytest.raises(UserError, match=rf"mask_ratio {wrong} is not in \(0, 1\]"):
            make()
    with pytest.raises(UserError, match=rf"mask_ratio {wrong} is not in \(0, 1\]"):
        Steps({0: 0.4, 5: wrong})


@pytest.mark.parametrize("table", [{}, {5: 0.4}, {-1: 0.4, 0: 0.2}])
def test_a_table_begins_with_step_0(table):
    with pytest.raises(UserError, match="must begin with step 0"):
        Steps(table)


def test_schedules_that_are_none():
    with pytest.raises(UserError, match="steps 0"):
        Ramp(0.4, 0.2, 0)
    with pytest.raises(UserError, match="'square' is not one of linear, cosine"):
        Ramp(0.4, 0.2, 10, "square")
