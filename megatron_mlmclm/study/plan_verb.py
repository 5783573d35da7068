"""`mlmclm plan`: print, and draw, what recipes will do before anything is started."""

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe, learning_rate, load_recipe
from megatron_mlmclm.study.plan import PhasePlan, Plan, plan

WIDTH = 100  # columns that a timeline needs; a narrower terminal wraps it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="file or preset, then any key=value for all of them"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline of the (one) recipe here")


def run(args: argparse.Namespace) -> None:
    """Print each plan, then, of several, the comparison."""
    names = [text for text in args.recipes if "=" not in text]
    overrides = [text for text in args.recipes if "=" in text]
    if args.png and len(names) != 1:
        raise UserError(f"--png draws one recipe, {len(names)} are named")
    recipes = [load_recipe(name, overrides) for name in names]
    plans = [plan(recipe) for recipe in recipes]
    console = Console()
    console.width = max(console.width, WIDTH)
    for each in plans:
        console.print(timeline(each))
    if len(plans) > 1:
        console.print(comparison(plans))
    if args.png:
        draw(recipes[0], plans[0], args.png)
        console.print(f"wrote {args.png}")


def draw(recipe: Recipe, each: Plan, path: Path) -> None:
    """The timeline as a picture; the learning rate is drawn at 1,000 steps or at every one."""
    from megatron_mlmclm.report.timeline import Stretch, draw_timeline

    stretches = [
        Stretch(phase.name, phase.first_step, phase.first_step + phase.steps - 1, phase.mask_ratio)
        for phase in each.phases
    ]
    steps = range(1, each.steps + 1, max(1, each.steps // 1000))
    draw_timeline(each.name, stretches, [(step, learning_rate(recipe, step)) for step in steps], path)


def timeline(each: Plan) -> Table:
    """One row a phase and one of totals."""
    weights = each.parameters
    table = Table(title=each.name, title_justify="left", caption_justify="left", box=box.SIMPLE)
    table.caption = (
        f"{weights.total / 1e6:,.1f}M parameters ({weights.layers / 1e6:,.1f}M without embedding and head);"
        f" {each.tokens_per_step:,} tokens a step"
    )
    for heading in ("phase", "steps", "attention", "masked", "lr", "tokens", "predicted", "FLOPs"):
        table.add_column(heading, justify="left" if heading in ("phase", "attention") else "right")
    for phase in each.phases:
        table.add_row(*_row(phase))
    table.add_section()
    table.add_row("all", f"{each.steps:,}", "", "", "", *_amounts(each))
    return table


def comparison(plans: list[Plan]) -> Table:
    """Budgets side by side; the share is of the first recipe's."""
    table = Table(title="budgets", title_justify="left", box=box.SIMPLE)
    for heading in ("recipe", "tokens", "predicted", "FLOPs", "FLOPs of the first"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for each in plans:
        table.add_row(each.name, *_amounts(each), f"{each.flops / plans[0].flops:.3f}")
    return table


def _row(phase: PhasePlan) -> tuple[str, ...]:
    masked = f"{phase.mask_ratio:.0%}" if phase.mask_ratio else ""
    rates = f"{phase.lr[0]:.1e} to {phase.lr[1]:.1e}"
    return phase.name, f"{phase.steps:,}", phase.attention, masked, rates, *_amounts(phase)


def _amounts(what: Plan | PhasePlan) -> tuple[str, str, str]:
    return f"{what.tokens / 1e9:,.4g}e9", f"{what.predicted / 1e9:,.4g}e9", f"{what.flops:.3g}"
