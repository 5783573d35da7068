"""Learning rates at the corners of every rule."""

import math

import pytest

from megatron_mlmclm.recipe import learning_rate, load_recipe

PHASES = "phases=[{objective: clm, steps: 100}, {objective: mlm, steps: 50, mask_ratio: 0.4}]"
BASE = [PHASES, "optimizer.lr=1.0", "optimizer.warmup_steps=0", "optimizer.decay_steps=0"]


def rates(steps, *overrides):
    recipe = load_recipe("paper/210m-mlm40-42k", [*BASE, *overrides])
    return [learning_rate(recipe, step) for step in steps]


def test_one_schedule_over_the_run():
    run = ["optimizer.warmup_steps=20", "optimizer.decay_steps=40"]
    corners = {1: 0.0, 11: 0.5, 20: 0.95, 21: 1.0, 101: 1.0, 111: 1.0, 112: 1 - 1 / 40, 131: 0.5, 150: 1 / 40}
    assert rates(corners, *run) == pytest.approx([*corners.values()])
    assert rates([131, 150], *run, "optimizer.min_lr=0.2") == pytest.approx([0.6, 0.2 + 0.8 / 40])


@pytest.mark.parametrize(
    ("shape", "half", "last"),  # what is left of the decay after 10 and after 19 of its 20 steps
    [
        ("linear", 0.5, 0.05),
        ("cosine", 0.5, (1 + math.cos(0.95 * math.pi)) / 2),
        ("1-sqrt", 1 - math.sqrt(0.5), 1 - math.sqrt(0.95)),
    ],
)
def test_a_phases_own_rule(shape, half, last):
    rule = f"phases.1.lr={{peak: 0.5, warmup_steps: 10, start: 0.2, decay_steps: 20, shape: {shape}, end: 0.1}}"
    corners = {
        100: 1.0,  # the phase before keeps the run's
        101: 0.5 * 0.2,
        106: 0.5 * 0.6,
        111: 0.5,
        131: 0.5,
        141: 0.5 * (0.1 + 0.9 * half),
        150: 0.5 * (0.1 + 0.9 * last),
    }
    assert rates(corners, rule) == pytest.approx([*corners.values()])


def test_a_rule_without_a_peak_has_the_runs():
    assert rates([100, 101, 150], "phases.1.lr={decay_steps: 50}") == pytest.approx([1.0, 1.0, 1 / 50])


def test_the_papers_schedule_is_one_over_both_phases():
    two, one = load_recipe("paper/610m-clm-10k-mlm40-42k"), load_recipe("paper/610m-mlm40-42k")
    corners = {
        1: 0.0,
        1001: 2.5e-4,
        2001: 5e-4,
        10_000: 5e-4,
        10_001: 5e-4,
        40_001: 5e-4,
        41_001: 2.5e-4,
        42_000: 2.5e-7,
    }
    for recipe in (two, one):
        assert [learning_rate(recipe, step) for step in corners] == pytest.approx([*corners.values()])
