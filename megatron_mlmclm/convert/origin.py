"""What a checkpoint says of itself: the model in it, and the run or the Hugging Face model that it came from."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_mlmclm.convert.checkpoint import CAUSAL, MODEL, read_common
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe, parse_recipe
from megatron_mlmclm.recipe.schema import ModelSection


@dataclass(frozen=True)
class Origin:
    """A checkpoint and what made it.

    Attributes:
        checkpoint: its folder.
        model: the model in it.
        recipe: the run's resolved recipe; None of an imported or merged model.
        causal: whether it attended causally last.
    """

    checkpoint: Path
    model: ModelSection
    recipe: Recipe | None
    causal: bool

    @property
    def step(self) -> int:
        """Optimizer steps that made it; 0 of an imported model."""
        if self.recipe is None:
            return 0
        number = self.checkpoint.name.removeprefix("iter_")
        return int(number) if number.isdigit() else self.recipe.last_step

    @property
    def home(self) -> Path:
        """The run's folder, or the import's: tokenizer/ and source/ are there."""
        return self.checkpoint.parent.parent


def read_origin(checkpoint: Path) -> Origin:
    """Imports megatron.

    Raises:
        UserError: the checkpoint has neither a recipe nor a model of ours in it.
    """
    common = read_common(checkpoint)
    if MODEL in common:
        model = ModelSection.model_validate(yaml.safe_load(common[MODEL]))
        return Origin(checkpoint, model, None, common[CAUSAL])
    text = getattr(common.get("args"), "mlmclm_recipe", None)
    if text is None:
        raise UserError(f"{checkpoint}: holds no recipe; was it written by megatron_mlmclm?")
    recipe = parse_recipe(yaml.safe_load(text), f"{checkpoint} (saved recipe)")
    found = Origin(checkpoint, recipe.model, recipe, causal=False)
    phase = recipe.stretch_at(found.step).phase
    return Origin(checkpoint, recipe.model, recipe, causal=all(view.direction == "causal" for view in phase.views))
