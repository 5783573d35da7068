"""Runs many small trainings in one torchrun world: starting a world costs ten seconds, another case only two.

    torchrun --nproc-per-node N tests/parallel/world.py CASES.json LOGS

CASES is a list of {"recipe": PATH, "extra": [overrides and flags], "probes": [names], "gradients": [steps],
"resume": [run folder, step] or null}.
Every case leaves metrics.jsonl in its run folder, as a real run does; probes leave files beside it.
"""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

from megatron_mlmclm import platform


def resume_from(source: str, step: int, output: str) -> None:
    """Make `output` look like the run `source` stopped right after saving `step`."""
    name = f"iter_{step:07d}"
    shutil.copytree(Path(source) / "checkpoints" / name, Path(output) / "checkpoints" / name)
    (Path(output) / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
    for file in ("recipe.yaml", "metrics.jsonl"):
        shutil.copy(Path(source) / file, Path(output) / file)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Before megatron's log handler binds it, and for as long as the process lives.
    sys.stdout = Path(sys.argv[2], f"rank_{rank}.log").open("a", buffering=1)  # noqa: SIM115
    logging.captureWarnings(True)
    platform.prepare()

    import torch

    from megatron_mlmclm.loop.folder import check_resumable, open_log
    from megatron_mlmclm.loop.request import read_request
    from megatron_mlmclm.loop.run import run
    from megatron_mlmclm.loop.start import finished_steps
    from megatron_mlmclm.model import chunked
    from tests.parallel import probes

    chunked.CHUNK = 300  # so that the small vocabulary of these runs takes several

    torch.distributed.init_process_group("gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        request = read_request(case["recipe"], case["extra"], world_size)
        if case["resume"] and rank == 0:
            resume_from(*case["resume"], request.recipe.output)
        torch.distributed.barrier()
        check_resumable(request.recipe)
        torch.distributed.barrier()
        log = sys.stdout
        open_log(request.recipe, rank)
        # As `pretrain` does, but in one process: segment by segment.
        finished = 0
        while finished < request.recipe.last_step:
            segment = request.recipe.segment_after(finished_steps(request.recipe))
            with probes.installed(case["probes"], case["gradients"], request, rank):
                run(request, segment, log, is_last_rank=rank == world_size - 1)
            probes.reset_megatron()
            finished = segment.last_step
        sys.stdout = log


if __name__ == "__main__":
    main()
