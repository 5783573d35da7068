"""Branching: a run that begins at another run's checkpoint and goes on with its steps, samples and data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_mlmclm.convert import Trunk, read_trunk
from megatron_mlmclm.data import Stream, Tokenizer
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe, parse_recipe, place_after

LATEST = "latest_checkpointed_iteration.txt"
OPTIMIZERS = {True: "distributed", False: "plain"}


def has_begun(recipe: Recipe) -> bool:
    """Whether the run folder holds checkpoints to go on from."""
    run = Path(recipe.output)
    return (run / "checkpoints" / LATEST).is_file() and (run / "recipe.yaml").is_file()


def finished_steps(recipe: Recipe) -> int:
    """Optimizer steps behind the newest checkpoint in the run folder, or behind the one that the run starts from."""
    latest = Path(recipe.output) / "checkpoints" / LATEST
    return int(latest.read_text()) if latest.is_file() else recipe.first_step - 1


def saved_recipe(recipe: Recipe) -> Recipe:
    """The resolved recipe that the run folder was begun with."""
    file = Path(recipe.output) / "recipe.yaml"
    return parse_recipe(yaml.safe_load(file.read_text(encoding="utf-8")), str(file))


def find_start(recipe: Recipe) -> tuple[Recipe, Trunk | None]:
    """`recipe` with the place where it starts, and the checkpoint there; None once the run has checkpoints of its own.

    Raises:
        UserError: no such checkpoint, or its model has another shape.
    """
    if recipe.start is None:
        return recipe, None
    if has_begun(recipe) and (before := saved_recipe(recipe).start) is not None:
        return _starting_at(recipe, before.step, before.sample, before.place), None
    trunk = read_trunk(recipe.start.checkpoint)
    theirs = parse_recipe(yaml.safe_load(trunk.recipe), f"{trunk.checkpoint} (saved recipe)")
    _check_model(theirs, recipe)
    _check_optimizer(trunk, recipe)
    if recipe.start.data == "continue" and theirs.seed != recipe.seed:
        raise UserError(
            f"start.from: its data goes on in the order of seed {theirs.seed}, the recipe has seed {recipe.seed}: take"
            " the same seed, or start.data=restart"
        )
    return _starting_at(recipe, trunk.step, trunk.sample, place_after(theirs, trunk.sample)), trunk


def check_origin(trunk: Trunk, recipe: Recipe, found: dict[str, Any]) -> None:
    """Refuse a branch whose tokenizer, data, sequence length or packing is not its trunk's, unless allowed.

    Raises:
        UserError: names both values and the flag.
    """
    for what, ours in found.items():
        theirs = trunk.origin.get(what, "cut")  # a trunk that says no packing is older than the choice
        if what == "data" and recipe.start.data == "restart":
            continue
        if theirs != ours and what not in recipe.start.allow:
            raise UserError(
                f"start.from {trunk.checkpoint}: its {what} was {_shown(theirs)}, the recipe has {_shown(ours)};"
                f" if that is meant, add --allow {what}"
            )


def origin(recipe: Recipe, tokenizer: Tokenizer, streams: dict[str, Stream]) -> dict[str, Any]:
    """What a branch must share with its trunk; saved in every checkpoint."""
    data = [[streams[source.path].fingerprint, source.weight] for source in recipe.data.train]
    return {
        "tokenizer": tokenizer.fingerprint,
        "data": data,
        "seq_length": recipe.model.seq_length,
        "packing": recipe.data.packing,
    }


def load_flags(recipe: Recipe, trunk: Trunk | None) -> Sequence[str]:
    """Where Megatron loads from: the run's own checkpoints, or the trunk's."""
    if trunk is None:
        return ["--load", str(Path(recipe.output) / "checkpoints")]
    flags = ["--load", str(Path(trunk.checkpoint).parent), "--ckpt-step", str(trunk.step)]
    loads = trunk.optimizer == OPTIMIZERS[recipe.parallel.use_distributed_optimizer]
    return flags if loads else [*flags, "--no-load-optim"]


def _starting_at(recipe: Recipe, step: int, sample: int, place: int) -> Recipe:
    start = recipe.start.model_copy(update={"step": step, "sample": sample, "place": place})
    return recipe.model_copy(update={"start": start})


def _check_model(theirs: Recipe, ours: Recipe) -> None:
    """`seq_length` is `check_origin`'s; how weights were drawn, and how many rows pad the vocabulary, may differ."""
    for key, value in theirs.model.model_dump(exclude={"seq_length", "init_method_std", "padded_vocab_size"}).items():
        if getattr(ours.model, key) != value:
            raise UserError(f"start.from: model.{key} is {value} there, {getattr(ours.model, key)} in the recipe")


def _check_optimizer(trunk: Trunk, recipe: Recipe) -> None:
    if recipe.phases[0].optimizer == "reset":
        return
    wanted = OPTIMIZERS[recipe.parallel.use_distributed_optimizer]
    if trunk.optimizer is None:
        raise UserError(
            f"start.from {trunk.checkpoint}: holds no optimizer state to keep; set phases.0.optimizer=reset"
        )
    if trunk.optimizer != wanted:
        raise UserError(
            f"start.from {trunk.checkpoint}: its optimizer state is {trunk.optimizer}, the recipe's is {wanted}: set"
            " parallel.use_distributed_optimizer alike, or phases.0.optimizer=reset"
        )


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value[:12]
    if isinstance(value, list):
        return ", ".join(f"{fingerprint[:12]} (weight {weight})" for fingerprint, weight in value)
    return str(value)
