"""`mlmclm plan`: print, and draw, what recipes will do before anything is started."""

import argparse
from pathlib import Path

from rich.console import Console

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import load_recipe
from megatron_mlmclm.recipe.budget import KINDS
from megatron_mlmclm.study.plan import plan
from megatron_mlmclm.study.tables import comparison, equalised, on_this_machine, timeline

WIDTH = 120  # columns that a timeline needs; a narrower terminal wraps it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="file or preset, then any key=value for all of them"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline of the (one) recipe here")
    parser.add_argument(
        "--equal", choices=KINDS, help="say how long the last phase of each other recipe must be for the first's budget"
    )


def run(args: argparse.Namespace) -> None:
    """Print each plan, then, of several, the comparison.

    Raises:
        UserError: a recipe can't be planned, or an option does not fit the number of recipes.
    """
    names = [text for text in args.recipes if "=" not in text]
    overrides = [text for text in args.recipes if "=" in text]
    if args.png and len(names) != 1:
        raise UserError(f"--png draws one recipe, {len(names)} are named")
    if args.equal and len(names) < 2:
        raise UserError(f"--equal compares recipes with the first, {len(names)} is named")
    plans = [plan(load_recipe(name, overrides)) for name in names]
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for each in plans:
        console.print(timeline(each))
    ceilings = _ceilings({each.recipe.precision for each in plans})
    for each in plans:
        console.print(on_this_machine(each, ceilings[each.recipe.precision]), soft_wrap=True)
    if len(plans) > 1:
        console.print(comparison(plans))
    for other in plans[1:] if args.equal else []:
        console.print(equalised(plans[0], other, args.equal), soft_wrap=True)
    if args.png:
        from megatron_mlmclm.study.picture import draw  # matplotlib takes its time

        draw(plans[0], args.png)
        console.print(f"wrote {args.png}")


def _ceilings(precisions: set[str]) -> dict[str, float]:
    """FLOP/s of one rank here, by precision."""
    import torch  # takes its time

    from megatron_mlmclm.platform.ceiling import matmul_ceiling

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {precision: matmul_ceiling(dtypes[precision]) for precision in precisions}
