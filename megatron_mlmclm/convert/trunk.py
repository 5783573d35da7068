"""What a branch must know of the checkpoint that it starts from.

It is read in a process of its own: a run that is about to start may not import megatron yet (its platform and its log
come first), and only megatron can read the arguments that are saved in a checkpoint.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_mlmclm.convert.checkpoint import find_checkpoint, read_common
from megatron_mlmclm.errors import UserError, run_cleanly

READ_ALREADY = "MLMCLM_TRUNK"  # environment: a launcher hands what it read to its ranks


@dataclass(frozen=True)
class Trunk:
    """A checkpoint of another run.

    Attributes:
        checkpoint: its folder, iter_N.
        step: optimizer steps that made it.
        sample: samples they took.
        recipe: the run's resolved recipe, YAML.
        origin: `tokenizer` and `data` fingerprints, `seq_length` and `packing` of the run.
        optimizer: "distributed" or "plain", the form of the optimizer state in it; None where there is none.
    """

    checkpoint: str
    step: int
    sample: int
    recipe: str
    origin: dict[str, Any]
    optimizer: str | None


def read_trunk(path: str) -> Trunk:
    """The checkpoint meant by `path` (see `find_checkpoint`).

    Raises:
        UserError: none there, or not one of ours.
    """
    folder = str(find_checkpoint(path))
    known = json.loads(os.environ.get(READ_ALREADY, "{}"))
    if known.get("checkpoint") == folder:
        return Trunk(**known)
    done = subprocess.run([sys.executable, "-m", __name__, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(done.stderr.strip().rpartition("error: ")[2] or f"{folder}: cannot be read")
    trunk = Trunk(**json.loads(done.stdout.splitlines()[-1]))
    os.environ[READ_ALREADY] = json.dumps(dataclasses.asdict(trunk))
    return trunk


def _describe(folder: str) -> Trunk:
    common = read_common(Path(folder))
    arguments = common["args"]
    recipe, origin = getattr(arguments, "mlmclm_recipe", None), getattr(arguments, "mlmclm_origin", None)
    if recipe is None or origin is None:
        raise UserError(f"{folder}: does not say which recipe and data made it; was it written by megatron_mlmclm?")
    form = "distributed" if arguments.use_distributed_optimizer else "plain"
    return Trunk(
        checkpoint=folder,
        step=common["iteration"],
        sample=arguments.consumed_train_samples,
        recipe=recipe,
        origin=origin,
        optimizer=None if arguments.no_save_optim else form,
    )


if __name__ == "__main__":
    run_cleanly(lambda: print(json.dumps(dataclasses.asdict(_describe(sys.argv[1])))))
