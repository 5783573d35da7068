"""Invariant 4: a resumed run is the run."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["tp1", "dp2"])
@pytest.mark.parametrize("step", [4, 8, 12])  # before, at and after the switch
def test_on_the_same_layout_bit_for_bit(worlds, layout, step):
    assert worlds.losses(f"{layout}-from-{step}") == worlds.losses(layout)
    resumed, unbroken = worlds.metrics(f"{layout}-from-{step}", "valid"), worlds.metrics(layout, "valid")
    assert [line["losses"] for line in resumed] == [line["losses"] for line in unbroken]


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "tp2", "tp2-pp2"])
def test_on_another_layout(worlds, layout):
    assert worlds.losses(f"dp2-to-{layout}") == pytest.approx(worlds.losses("dp2"), rel=1e-5)
