"""`mlmclm train`: check a recipe, then start torchrun with it on this machine."""

import argparse
import os
import subprocess
import sys

from megatron_mlmclm.loop.folder import check_resumable
from megatron_mlmclm.loop.request import read_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb. What is left over (`key=value`, then Megatron flags) goes to the run."""
    parser.add_argument("recipe", help="recipe file (YAML)")
    parser.add_argument("--nproc", type=int, default=1, help="processes on this machine, one per GPU (default 1)")
    parser.set_defaults(passes_on=True)
    parser.epilog = "Then any key=value overrides of the recipe, then any of Megatron's own flags."


def run(args: argparse.Namespace) -> int:
    """Exit status: torchrun's. A mistake in the recipe or its data is found before any process starts."""
    check_resumable(read_request(args.recipe, args.extra, args.nproc).recipe)
    # torch would give each of N processes all cores.
    threads = max(1, (os.cpu_count() or 1) // args.nproc)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
    entry = ["-m", "megatron_mlmclm.pretrain", "--recipe", args.recipe, *args.extra]
    return subprocess.run(torchrun + entry, env=environment, check=False).returncode
