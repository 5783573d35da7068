"""Invariants 1, 5 and 6: the same losses, gradients and attention whatever the layout."""

import pytest
import torch

from tests.parallel.fixed import CHANGED_POSITION

pytestmark = pytest.mark.slow

LAYOUTS = [
    "micro-1-workers-2",
    "dp2",
    "dp2-plain",
    "tp2",
    "tp2-plain",
    "tp2-sp",
    "pp2",
    "pp2-plain",
    "pp2-vpp2",
    "tp2-pp2",
]
WITH_GRADIENTS = [
    *(("tp1", name) for name in ("dp2-plain", "tp2", "tp2-sp", "pp2", "pp2-vpp2", "tp2-pp2")),
    *(("tied-tp1", name) for name in ("tied-pp2", "tied-tp2-pp2")),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_is_the_same(worlds, layout):
    reference = worlds.losses("tp1")
    assert len(reference) == 20
    assert worlds.losses(layout) == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_validation_loss_is_the_same(worlds, layout):
    for ours, reference in zip(worlds.metrics(layout, "valid"), worlds.metrics("tp1", "valid"), strict=True):
        assert ours["losses"] == pytest.approx(reference["losses"], rel=1e-5)


@pytest.mark.parametrize("step", [1, 9])
@pytest.mark.parametrize(("reference", "layout"), WITH_GRADIENTS)
def test_every_gradient_is_the_same(worlds, reference, layout, step):
    """Losses cannot show a gradient that is off by a factor; the vocabulary's padding depends on the layout."""
    expected, found = worlds.gradients(reference, step), worlds.gradients(layout, step)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        rows = min(len(gradient), len(found[name]), 1003) if "embed" in name[0] or "output" in name[0] else None
        error = (found[name][:rows] - gradient[:rows]).norm() / gradient.norm()
        assert error < 2e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2-sp"])
def test_a_later_token_moves_earlier_outputs_only_in_the_bidirectional_phase(worlds, layout):
    first_moved = torch.load(worlds.folder / layout / "perturbation_0.pt")
    assert first_moved == {step: CHANGED_POSITION if step <= 8 else 0 for step in range(1, 21)}


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2-sp"])
def test_the_masked_head_is_cross_entropy_at_predicted_rows(worlds, layout):
    """Against plain torch, also where rows exceed the capacity (none dropped) and where nothing is predicted (zero)."""
    for rank in range(1 if layout == "tp1" else 2):
        found = torch.load(worlds.folder / layout / f"head_{rank}.pt")
        for case, (rows, loss_error, gradient_error) in found.items():
            assert loss_error < 1e-6, (case, rank)
            assert gradient_error < 1e-6, (case, rank)
            assert rows % 8 == 0
    for head in ("whole", "chunked", "dense"):
        assert found[f"{head}, more rows than the capacity"][0] > 8
        assert found[f"{head}, nothing predicted"][0] == 8


def test_the_run_learns_and_the_switch_is_where_the_recipe_says(worlds):
    metrics = worlds.metrics("tp1")
    assert [line["objective"] for line in metrics] == ["clm"] * 8 + ["mlm"] * 6 + ["mntp"] * 6
    assert metrics[7]["loss"] < metrics[0]["loss"] - 0.3
    assert metrics[-1]["lr"] == pytest.approx(3e-3 / 4)  # the last of four decay steps
