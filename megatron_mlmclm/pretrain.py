"""Pretraining, as torchrun starts it on every rank:

torchrun --nproc-per-node N -m megatron_mlmclm.pretrain --recipe R.yaml [key=value ...] [any Megatron flag]
"""

import argparse
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

from megatron_mlmclm.errors import run_cleanly


def pretrain(argv: Sequence[str]) -> None:
    """Table of contents of a run. Megatron is imported only after the platform is prepared."""
    from megatron_mlmclm import platform
    from megatron_mlmclm.loop.folder import check_resumable, open_log
    from megatron_mlmclm.loop.request import read_request
    from megatron_mlmclm.loop.start import finished_steps
    from megatron_mlmclm.recipe import check_platform

    parser = argparse.ArgumentParser(prog="megatron_mlmclm.pretrain", allow_abbrev=False)
    parser.add_argument("--recipe", required=True)
    known, extra = parser.parse_known_args(argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    request = read_request(known.recipe, extra, world_size)
    recipe = request.recipe
    check_resumable(recipe)
    segment = recipe.segment_after(finished_steps(recipe))
    check_platform(recipe, platform.transformer_implementation(), platform.has_nvidia_apex(), platform.has_liger())
    terminal = open_log(recipe, rank)
    platform.prepare()

    from megatron_mlmclm.loop.run import run

    run(request, segment, terminal, is_last_rank=rank == world_size - 1)
    if segment.last_step < recipe.last_step:
        go_on()


def go_on() -> None:
    """Begin the run's next segment, which has another batch size, in this process's place: Megatron fixes it for life.

    The launcher sees the same process go on. The ranks meet again at another port of rank 0's machine: the launcher's
    own store still has the addresses at which they met before.
    """
    import torch

    port = [_free_port() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(port, src=0)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os.environ |= {"MASTER_PORT": str(port[0]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    for child in multiprocessing.active_children():  # loader workers: they would not notice that their parent is new
        child.terminate()
        child.join()
    sys.stdout.flush()
    os.execv(sys.executable, sys.orig_argv)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def leave_with_launcher() -> None:
    """End this rank when its torchrun is gone, however it went: else it would go on writing into the run folder."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Entry point. A user's mistake is said once, by rank 0; every rank leaves with status 2."""
    leave_with_launcher()
    run_cleanly(lambda: pretrain(sys.argv[1:]), patience=0.0 if os.environ.get("RANK", "0") == "0" else 5.0)


if __name__ == "__main__":  # checkpoint writers are spawned and import this module
    main()
