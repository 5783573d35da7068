"""The figure of a run that has not been started: its phases, learning rate and masking ratio."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.report.curves import INK, MUTED, PHASE_COLOURS, STYLE, to_bytes


class Stretch(NamedTuple):
    """One phase as drawn: steps [first, last], both included."""

    name: str
    first: int
    last: int
    mask_ratio: float | None


def draw_timeline(title: str, phases: Sequence[Stretch], rates: Sequence[tuple[int, float]], path: Path) -> None:
    """Draw `phases` as coloured stretches, `rates` [(step, learning rate)] as a line, masking ratios below it.

    UserError where `path` cannot be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.2), dpi=160, layout="constrained")
        rate_axes, mask_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for number, phase in enumerate(phases):
            colour = PHASE_COLOURS[number % len(PHASE_COLOURS)]
            for axes in (rate_axes, mask_axes):
                axes.axvspan(phase.first - 1, phase.last, color=colour, alpha=0.12, linewidth=0)
            middle = (phase.first + phase.last) / 2
            rate_axes.text(
                middle, 1.02, phase.name, color=colour, ha="center", transform=rate_axes.get_xaxis_transform()
            )
            if phase.mask_ratio:
                mask_axes.plot([phase.first - 1, phase.last], [phase.mask_ratio] * 2, color=colour, linewidth=2.2)
        rate_axes.plot(*zip(*rates, strict=True), color=INK, linewidth=1.8)
        rate_axes.set(ylabel="learning rate", ylim=(0, None))
        rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        mask_axes.set(ylabel="masked", xlabel=f"step of {title}", ylim=(0, 1), xlim=(0, phases[-1].last))
        mask_axes.tick_params(colors=MUTED)
        write_file(path, to_bytes(figure, "png"))
