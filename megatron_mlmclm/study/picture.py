"""A plan as a picture: its phases, learning rate, masking ratios, and the three budgets as they are spent."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_mlmclm.recipe import Stretch, learning_rate
from megatron_mlmclm.recipe.budget import KINDS, Cost, phase_cost, ratios, turns
from megatron_mlmclm.recipe.phase import PartSection
from megatron_mlmclm.report.timeline import Drawn, Mask, Sum, draw_timeline
from megatron_mlmclm.study.plan import Plan
from megatron_mlmclm.study.tables import amount

POINTS = 200  # at most, of a curve inside one phase


def draw(each: Plan, path: Path) -> None:
    """Write the picture of a plan to `path`. UserError where it cannot be written."""
    stretches = each.recipe.stretches
    phases = [Drawn(s.phase.label, s.first_step, s.last_step, list(_masks(s))) for s in stretches]
    steps = set(range(each.recipe.first_step, each.recipe.last_step + 1, max(1, each.steps // 1000)))
    steps |= {step for s in stretches for step in (s.first_step, s.last_step)}
    rates = [(step, learning_rate(each.recipe, step)) for step in sorted(steps)]
    draw_timeline(each.name, phases, rates, _sums(each), path)


def _masks(stretch: Stretch) -> Iterator[Mask]:
    """What masks in a phase: one line, or band, for each of its parts, with how much of the phase it has."""
    views, phase = stretch.phase.views, stretch.phase
    for view, turn in zip(views, turns(phase, stretch.steps), strict=True):
        if view.mask_ratio is not None:
            yield Mask(view.label, _points(view, stretch), float(turn.mean()), phase.objective == "alternating")


def _points(view: PartSection, stretch: Stretch) -> list[tuple[float, float, float]]:
    """(step, lowest ratio, highest ratio) along the phase."""
    begin, end = stretch.first_step - 1, stretch.last_step
    if isinstance(view.mask_ratio, tuple):
        return [(begin, *view.mask_ratio), (end, *view.mask_ratio)]
    values = ratios(view.mask_ratio, stretch.steps)
    edges = np.append(_few(len(values)), np.flatnonzero(np.abs(np.diff(values)) > 0.01))  # a table's jumps are kept
    # Each step has its ratio from its own beginning to its end.
    width = stretch.steps / len(values)
    sides = [(begin + (k + side) * width, values[k], values[k]) for k in np.unique(edges) for side in (0, 1)]
    return [(float(step), float(low), float(high)) for step, low, high in sides]


def _sums(each: Plan) -> list[Sum]:
    """Each budget as spent after every so many steps, as a share of all of it."""
    curves: dict[str, list[tuple[float, float]]] = {kind: [(each.recipe.first_step - 1, 0.0)] for kind in KINDS}
    before, total = Cost(), each.cost
    for planned in each.phases:
        stretch = planned.stretch
        for done in _few(stretch.steps) + 1:
            now = before + phase_cost(each.recipe, stretch.phase, stretch.steps, each.rows, until=int(done))
            for kind, curve in curves.items():
                curve.append((stretch.first_step - 1 + int(done), now.of(kind) / total.of(kind)))
        before += planned.cost
    return [Sum(f"{kind} {amount(total.of(kind))}", curve) for kind, curve in curves.items()]


def _few(count: int) -> np.ndarray:
    """At most `POINTS` of the numbers below `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, POINTS)).astype(int))
