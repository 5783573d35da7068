"""`mlmclm report RUN_DIR`: one HTML page of a run, and its curves as a PNG beside it."""

import argparse
from pathlib import Path

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.report.html import FIGURE_FILE, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run: metrics.jsonl and recipe.yaml")
    parser.add_argument("--fill-mask", type=Path, metavar="FILE.json", help="what `mlmclm fill-mask --output` wrote")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default: report.html)")


def run(args: argparse.Namespace) -> None:
    """Write the page and the figure, and say where they are."""
    if not args.run_dir.is_dir():
        raise UserError(f"{args.run_dir}: no such folder; name the folder that `mlmclm train` wrote")
    write_report(args.run_dir, args.fill_mask, args.output)
    print(f"wrote {args.output} and {args.output.with_name(FIGURE_FILE)}")
