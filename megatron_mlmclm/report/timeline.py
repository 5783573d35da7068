"""The figure of a run that has not been started: its phases, learning rate, masking ratios and budgets."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.report.curves import INK, MUTED, PHASE_COLOURS, STYLE, to_bytes

WIDTH = 9.0  # inches
LETTER = 0.001  # of the axes' width, a letter, for each point of its size
SMALL = 9  # points; of what stands inside the axes
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # of the budgets, whose lines often lie on each other


class Mask(NamedTuple):
    """A masking ratio as drawn: `points` (step, lowest, highest); `share` of the phase; `broken`: it comes and goes."""

    name: str
    points: Sequence[tuple[float, float, float]]
    share: float = 1.0
    broken: bool = False


class Drawn(NamedTuple):
    """One phase as drawn: steps [first, last], both included."""

    name: str
    first: int
    last: int
    masks: Sequence[Mask]


class Sum(NamedTuple):
    """A budget as it is spent: `points` (finished steps, share of the whole)."""

    name: str
    points: Sequence[tuple[float, float]]


def draw_timeline(
    title: str, phases: Sequence[Drawn], rates: Sequence[tuple[int, float]], sums: Sequence[Sum], path: Path
) -> None:
    """Draw `phases` as coloured stretches, `rates` (step, learning rate), masking ratios, and `sums` below each other.

    UserError where `path` cannot be written.
    """
    names = list(dict.fromkeys(phase.name for phase in phases))
    colours = {name: PHASE_COLOURS[number % len(PHASE_COLOURS)] for number, name in enumerate(names)}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 6.0), dpi=160, layout="constrained")
        rate_axes, mask_axes, sum_axes = figure.subplots(3, 1, sharex=True, height_ratios=(2.4, 1.1, 1.5))
        for phase in phases:
            for axes in (rate_axes, mask_axes, sum_axes):
                axes.axvspan(phase.first - 1, phase.last, color=colours[phase.name], alpha=0.12, linewidth=0)
            draw_masks(mask_axes, phase, colours[phase.name], phases[-1].last - phases[0].first + 1)
        name_phases(figure, rate_axes, phases, colours)
        rate_axes.plot(*zip(*rates, strict=True), color=INK, linewidth=1.8, marker="." if len(rates) == 1 else None)
        rate_axes.set(ylabel="learning rate", ylim=(0, None), xlim=(phases[0].first - 1, phases[-1].last))
        rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        rate_axes.yaxis.get_offset_text().set_x(-0.07)  # clear of the first phase's name
        mask_axes.set(ylabel="masked", ylim=(0, 1.04), yticks=(0, 0.5, 1))
        mask_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        draw_sums(sum_axes, sums)
        sum_axes.set_xlabel(f"step of {title}")
        sum_axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10)))
        sum_axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        for axes in (rate_axes, mask_axes):
            axes.tick_params(axis="x", length=0)
        write_file(path, to_bytes(figure, "png"))


def draw_masks(axes: Axes, phase: Drawn, colour: str, total: int) -> None:
    """A phase's ratios as lines that move, or bands; parts of a phase thinner, with their shares where there is room.

    `total`: steps of the run.
    """
    width = (phase.last - phase.first + 1) / len(phase.masks) if phase.masks else 0
    for number, mask in enumerate(phase.masks):
        steps, low, high = zip(*mask.points, strict=True)
        if low != high:
            axes.fill_between(steps, low, high, color=colour, alpha=0.35, linewidth=0)
        else:
            dashes = (0, (2, 1)) if mask.broken else "-"
            axes.plot(
                steps, low, color=colour, linewidth=0.8 + 1.6 * mask.share, linestyle=dashes, solid_capstyle="butt"
            )
        label = f"{mask.name} {100 * mask.share:.3g}%"
        if mask.share < 1.0 and fits(label, width / total, SMALL):
            step = phase.first - 1 + number * width  # side by side: parts may have one ratio
            at = float(np.interp(step, steps, high))
            place = (4, 3 if at < 0.75 else -12)  # above the line, below it near the upper edge
            axes.annotate(label, (step, at), xytext=place, textcoords="offset points", fontsize=SMALL)


def fits(label: str, share: float, size: float = 12) -> bool:
    """Whether `label` in letters of `size` points is no wider than `share` of the axes."""
    return len(label) * LETTER * size < share


def name_phases(figure: Figure, axes: Axes, phases: Sequence[Drawn], colours: dict[str, str]) -> None:
    """Each name above its stretch where all of them fit there, else once each in a legend."""
    steps = phases[-1].last - phases[0].first + 1
    if not all(fits(phase.name, (phase.last - phase.first + 1) / steps) for phase in phases):
        patches = [Patch(color=colour, alpha=0.5, label=name) for name, colour in colours.items()]
        figure.legend(handles=patches, loc="outside upper center", ncols=min(6, len(patches)), fontsize=11)
        return
    for phase in phases:
        middle, colour = (phase.first - 1 + phase.last) / 2, colours[phase.name]
        axes.text(middle, 1.02, phase.name, color=colour, ha="center", transform=axes.get_xaxis_transform())


def draw_sums(axes: Axes, sums: Sequence[Sum]) -> None:
    """Budgets as shares of their totals; the legend names the totals."""
    for each, dashes in zip(sums, DASHES, strict=False):
        axes.plot(*zip(*each.points, strict=True), color=INK, linewidth=1.6, linestyle=dashes, label=each.name)
    axes.set(ylabel="spent", ylim=(0, 1.04), yticks=(0, 0.5, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="best", fontsize=10, labelcolor=MUTED)
