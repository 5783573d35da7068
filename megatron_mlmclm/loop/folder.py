"""The run folder: resolved recipe, tokenizer, logs, metrics, TensorBoard and checkpoints of one run."""

import logging
import shutil
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TextIO

from megatron_mlmclm.aside import os_errors, write_file
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.start import has_begun, saved_recipe
from megatron_mlmclm.recipe import Recipe, Stretch, dump_recipe
from megatron_mlmclm.recipe.phase import RatioSchedule
from megatron_mlmclm.recipe.schema import OptimizerSection

# A run that goes on must keep these; phases may be added or lengthened, and the warm-up and decay with them.
FIXED = (
    *("seed", "precision", "model", "batch.global_batch_size", "data.train", "data.packing", "validation", "start"),
    "parallel.use_distributed_optimizer",  # the two keep their state in different forms
    *(f"optimizer.{key}" for key in OptimizerSection.model_fields if key not in ("warmup_steps", "decay_steps")),
)
FREE_IN_PHASE = {"steps", "tokens", "samples", "batch"}  # compared by what they come to


def check_resumable(recipe: Recipe) -> None:
    """Refuse to go on with checkpoints that another recipe made, naming the key and both values."""
    if not has_begun(recipe):
        return
    saved = saved_recipe(recipe)
    before, now = (each.model_dump(by_alias=True, exclude={"start": {"allow"}}) for each in (saved, recipe))
    for key in FIXED:
        _same(recipe, key, _value(before, key), _value(now, key))
    for old, new in zip_longest(saved.stretches, recipe.stretches):
        if old is not None:
            _same_phase(recipe, old, new, is_last=old.ordinal == len(saved.phases) - 1)


def _same_phase(recipe: Recipe, old: Stretch, new: Stretch | None, *, is_last: bool) -> None:
    """An old phase stays as it is, but the last may be longer, unless its masking ratio stretches with it."""
    key = f"phases.{old.ordinal}"
    if new is None:
        _same(recipe, key, old.phase.label, "no such phase")
    before, now = (each.phase.model_dump(exclude=FREE_IN_PHASE) for each in (old, new))
    for name, value in before.items():
        _same(recipe, f"{key}.{name}", value, now[name])
    _same(recipe, f"{key}.batch.global_batch_size", old.batch.global_batch_size, new.batch.global_batch_size)
    ratios = [view.mask_ratio for view in old.phase.views]
    stretches = any(isinstance(ratio, RatioSchedule) and not ratio.last_change for ratio in ratios)
    if not is_last or stretches or new.steps < old.steps:
        _same(recipe, f"{key}.steps", old.steps, new.steps)


def _same(recipe: Recipe, key: str, old: object, new: object) -> None:
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for part, value in old.items():
            _same(recipe, f"{key}.{part}", value, new[part])
    elif old != new:
        raise UserError(
            f"{recipe.output} holds checkpoints of a run with {key} = {old}, the recipe has {new}; give another output"
        )


def _value(values: dict, key: str) -> object:
    for part in key.split("."):
        values = values[part]
    return values


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
