"""`mlmclm train`: check a recipe, then start torchrun with it on this machine."""

import argparse
import logging
import os
import sys

from megatron_mlmclm.errors import EXIT_USER_ERROR
from megatron_mlmclm.loop.folder import check_resumable
from megatron_mlmclm.loop.request import read_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb. What is left over (`key=value`, then Megatron flags) goes to the run."""
    parser.add_argument("recipe", help="recipe file (YAML)")
    parser.add_argument("--nproc", type=int, default=1, help="processes on this machine, one per GPU (default 1)")
    parser.set_defaults(passes_on=True)
    parser.epilog = "Then any key=value overrides of the recipe, then any of Megatron's own flags."


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 2 for a user's mistake (said in one line), 1 for a run that failed.

    A mistake in the recipe or its data is found before any process starts.
    """
    check_resumable(read_request(args.recipe, args.extra, args.nproc).recipe)
    # torch would give each of N processes all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.nproc)))
    entry = ["-m", "megatron_mlmclm.pretrain", "--recipe", args.recipe, *args.extra]
    return _torchrun(["--standalone", f"--nproc-per-node={args.nproc}", *entry])


def _torchrun(arguments: list[str]) -> int:
    """torchrun in this process: what it says of a failed rank is cut down to one line."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != EXIT_USER_ERROR:  # else the rank has said what is wrong
            end = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
            print(f"mlmclm: rank {rank} ended with {end}; what it said is above, or in its log", file=sys.stderr)
            return 1
        return EXIT_USER_ERROR
    return 0
