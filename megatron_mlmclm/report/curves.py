"""The figure of a run: loss with its phases and validations, and the learning rate under it."""

import io
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.report.metrics import train_records, valid_records

# Okabe and Ito's colours, which colour-blind readers tell apart; phases take them in turn.
PHASE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v")  # validation losses, in the order of their names
INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e7eb"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
    "svg.hashsalt": "megatron_mlmclm",  # the same run draws the same bytes
}
SMOOTHING_SHARE = 0.02  # the smoothed line averages over about this share of the steps


def draw_curves(
    metrics: list[dict[str, Any]],
    path_png: Path,
    path_svg: Path | None = None,
    *,
    reference: tuple[str, float] | None = None,
) -> None:
    """Draw a run's records to `path_png` (1,440 x 864 pixels) and, if given, `path_svg`; both written whole or not.

    `reference` (name, loss) adds a dashed line to compare with, such as the unigram guess. UserError: cannot write.
    """
    steps = train_records(metrics)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.4), dpi=160, layout="constrained")
        loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
        phases = [list(group) for _, group in groupby(steps, key=lambda record: record["phase"])]
        for phase in phases:
            draw_phase(loss_axes, rate_axes, phase, len(steps))
        mark_switches(loss_axes, rate_axes, phases)
        draw_validations(loss_axes, valid_records(metrics))
        if reference:
            name, loss = reference
            loss_axes.axhline(loss, color=MUTED, linestyle=(0, (5, 4)), linewidth=1.4, label=f"{name} {loss:.2f}")
        finish_axes(loss_axes, rate_axes, steps)
        write_file(path_png, to_bytes(figure, "png"))
        if path_svg:
            write_file(path_svg, to_bytes(figure, "svg"))


def draw_phase(loss_axes: Axes, rate_axes: Axes, phase: list[dict[str, Any]], total: int) -> None:
    """One phase's loss (pale as logged, strong smoothed) and learning rate. `total`: steps of the whole run."""
    first = phase[0]
    colour = colour_of(first)
    at = [record["step"] for record in phase]
    losses = np.array([record["loss"] for record in phase])
    window = max(1, round(total * SMOOTHING_SHARE))
    label = f"phase {first['phase']}: {first['objective'].upper()}"
    loss_axes.plot(at, losses, color=colour, alpha=0.28, linewidth=1)
    # A phase of one step has no line to see.
    loss_axes.plot(
        at, smooth(losses, window), color=colour, linewidth=2.2, label=label, marker="." if len(at) == 1 else None
    )
    rate_axes.plot(at, [record["lr"] for record in phase], color=colour, linewidth=2)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over `window` // 2 values on either side of each, as far as there are; what isn't finite is passed over."""
    place, reach = np.arange(len(values)), window // 2
    finite = np.isfinite(values)
    counts = np.cumsum(np.append(0, finite))
    sums = np.cumsum(np.append(0.0, np.where(finite, values, 0.0)))
    first, stop = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(values))
    count = counts[stop] - counts[first]
    return np.divide(sums[stop] - sums[first], count, where=count > 0, out=np.full(len(values), np.nan))


def mark_switches(loss_axes: Axes, rate_axes: Axes, phases: list[list[dict[str, Any]]]) -> None:
    """A vertical line, with what begins there, at each phase's first step but the run's."""
    first, last = phases[0][0]["step"], phases[-1][-1]["step"]
    for before, phase in zip(phases, phases[1:], strict=False):
        step = phase[0]["step"]
        place = (step - first) / (last - first)  # a label near an edge grows away from it
        for axes in (loss_axes, rate_axes):
            axes.axvline(step, color=INK, linewidth=1, linestyle=":")
        names = f"{before[0]['objective'].upper()} → {phase[0]['objective'].upper()}"
        loss_axes.annotate(
            f"{names}  (step {step:,})",
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="left" if place < 0.2 else "right" if place > 0.8 else "center",
            va="bottom",
            fontsize=11,
            color=INK,
        )


def draw_validations(axes: Axes, validations: list[dict[str, Any]]) -> None:
    """Each validation loss as points, one marker shape a name, in the colour of the phase they were taken in."""
    names = sorted({name for record in validations for name in record["losses"]})
    for marker, name in zip(MARKERS * len(names), names, strict=False):
        points = [
            (record["step"], record["losses"][name], record) for record in validations if name in record["losses"]
        ]
        axes.scatter(
            [step for step, _, _ in points],
            [loss for _, loss, _ in points],
            color=[colour_of(record) for _, _, record in points],
            marker=marker,
            s=44,
            edgecolor="white",
            linewidth=1.1,
            zorder=3,
        )
        # The legend's own marker is grey: its shape says what it is, colours are the phases'.
        axes.scatter([], [], color=MUTED, marker=marker, s=44, label=f"validation: {name.upper()}")


def colour_of(record: dict[str, Any]) -> str:
    """The colour of the phase that `record` belongs to."""
    return PHASE_COLOURS[record["phase"] % len(PHASE_COLOURS)]


def finish_axes(loss_axes: Axes, rate_axes: Axes, steps: list[dict[str, Any]]) -> None:
    """Labels, limits, legend."""
    loss_axes.set_ylabel("loss (nats per token)")
    loss_axes.tick_params(axis="x", length=0)
    loss_axes.legend(loc="upper right", fontsize=11)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_xlabel("step")
    rate_axes.set_ylim(bottom=0)
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rate_axes.yaxis.set_major_locator(MaxNLocator(3))
    rate_axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10)))
    first, last = steps[0]["step"], steps[-1]["step"]
    if last > first:
        rate_axes.set_xlim(first - (last - first) * 0.01, last + (last - first) * 0.015)


def to_bytes(figure: Figure, kind: str) -> bytes:
    """The figure as a file's content, without a date in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None, facecolor="white")
    return buffer.getvalue()
