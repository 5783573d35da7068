"""The run folder: resolved recipe, tokenizer, logs, metrics, TensorBoard and checkpoints of one run."""

import logging
import shutil
import sys
from pathlib import Path
from typing import TextIO

import yaml

from megatron_mlmclm.aside import os_errors, write_file
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe, dump_recipe
from megatron_mlmclm.recipe.schema import OptimizerSection

# A run that goes on must keep these; phases may be added or lengthened, and the warm-up and decay with them. Megatron
# takes the optimizer's settings from the checkpoint, so that a changed one would be ignored, or (lr) not load.
FIXED = (
    *("seed", "precision", "model", "batch.global_batch_size", "data.train", "validation", "phases"),
    "parallel.use_distributed_optimizer",  # the two keep their state in different forms
    *(f"optimizer.{key}" for key in OptimizerSection.model_fields if key not in ("warmup_steps", "decay_steps")),
)


def check_resumable(recipe: Recipe) -> None:
    """Refuse to go on with checkpoints that another recipe made, naming the key and both values."""
    saved = Path(recipe.output) / "recipe.yaml"
    if not (Path(recipe.output) / "checkpoints" / "latest_checkpointed_iteration.txt").is_file() or not saved.is_file():
        return
    before, now = yaml.safe_load(saved.read_text(encoding="utf-8")), recipe.model_dump()
    for key in FIXED:
        old, new = _value(before, key), _value(now, key)
        if key == "phases" and _extends(old, new):
            continue
        if old != new:
            raise UserError(
                f"{recipe.output} holds checkpoints of a run with {key} = {old}, the recipe has {new};"
                " give another output"
            )


def _value(values: dict, key: str) -> object:
    for part in key.split("."):
        values = values[part]
    return values


def _extends(old: list[dict], new: list[dict]) -> bool:
    """Whether `new` only adds steps: old phases stay as they are, but the last may be longer."""
    if len(new) < len(old) or new[: len(old) - 1] != old[:-1]:
        return False
    last, longer = old[-1], new[len(old) - 1]
    return {**last, "steps": 0} == {**longer, "steps": 0} and longer["steps"] >= last["steps"]


def open_log(recipe: Recipe, rank: int) -> TextIO:
    """Send this process's chatter to logs/rank_N.log of the run folder and return the real terminal.

    Must run before megatron is imported: its log handler binds `sys.stdout` then. Errors still reach stderr.
    """
    logs = Path(recipe.output) / "logs"
    with os_errors(logs):
        logs.mkdir(parents=True, exist_ok=True)
        file = (logs / f"rank_{rank}.log").open("a", buffering=1, encoding="utf-8")
    terminal, sys.stdout = sys.stdout, file
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    logging.captureWarnings(True)
    return terminal


def record_run(recipe: Recipe) -> None:
    """Keep the resolved recipe and a copy of the tokenizer in the run folder."""
    run = Path(recipe.output)
    write_file(run / "recipe.yaml", dump_recipe(recipe).encode())
    with os_errors(run / "tokenizer"):
        shutil.copytree(recipe.data.tokenizer, run / "tokenizer", dirs_exist_ok=True)
