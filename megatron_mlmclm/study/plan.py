"""What a recipe will do, computed from the recipe alone: parameters, tokens, predicted tokens, FLOPs, learning rate."""

from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe, Stretch, learning_rate
from megatron_mlmclm.recipe.budget import Cost, Parameters, parameters, phase_cost, recipe_cost, settled


@dataclass(frozen=True)
class PhasePlan:
    """One phase in numbers. `rates`: the learning rate at its first step, at its highest, and at its last step."""

    stretch: Stretch
    cost: Cost
    rates: tuple[float, float, float]


@dataclass(frozen=True)
class Plan:
    """A run in numbers. `recipe` has all its lengths; `filled`: `compute` gave it one. `rows`: of the vocabulary."""

    recipe: Recipe
    rows: int
    filled: bool
    parameters: Parameters
    phases: tuple[PhasePlan, ...]

    @property
    def name(self) -> str:
        """The recipe's."""
        return self.recipe.name

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step at the run's batch size; a phase may have its own."""
        return self.recipe.batch.global_batch_size * self.recipe.model.seq_length

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.recipe.steps

    @property
    def cost(self) -> Cost:
        """Of all phases."""
        return reduce(add, (phase.cost for phase in self.phases))

    @property
    def tokens(self) -> float:
        """Tokens read."""
        return self.cost.tokens

    @property
    def predicted(self) -> float:
        """Tokens predicted, expected."""
        return self.cost.predicted

    @property
    def flops(self) -> float:
        """Floating point operations of forward and backward."""
        return self.cost.flops


def plan(recipe: Recipe) -> Plan:
    """Compute the plan of `recipe`. Neither its data nor megatron is needed, nor the checkpoint that it starts from.

    Raises:
        UserError: the vocabulary is not known (no padded_vocab_size, and no tokenizer folder), or a phase has no length
            and `compute` can't give it one.
    """
    rows = vocabulary_rows(recipe)
    whole = settled(recipe, rows)
    recipe_cost(whole, rows)  # refuses a phase without a length
    phases = []
    for stretch in whole.stretches:
        cost = phase_cost(whole, stretch.phase, stretch.steps, rows)
        phases.append(PhasePlan(stretch, cost, _rates(whole, stretch)))
    return Plan(whole, rows, whole is not recipe, parameters(whole.model, rows), tuple(phases))


def _rates(recipe: Recipe, stretch: Stretch) -> tuple[float, float, float]:
    """No rule rises after its warm-up: the highest rate in the phase is at the step after it, or nearest to that."""
    rule, begin = (stretch.phase.lr, stretch.first_step) if stretch.phase.lr else (recipe.optimizer, recipe.first_step)
    top = min(max(begin + rule.warmup_steps, stretch.first_step), stretch.last_step)
    return tuple(learning_rate(recipe, step) for step in (stretch.first_step, top, stretch.last_step))


def vocabulary_rows(recipe: Recipe) -> int:
    """Rows that count: the model's or the tokenizer's, or the padded size where neither is at hand.

    Raises:
        UserError: neither is known.
    """
    if recipe.model.vocab_size is not None:
        return recipe.model.vocab_size
    if Path(recipe.data.tokenizer).is_dir():
        return Tokenizer.load(recipe.data.tokenizer).vocab_size
    if recipe.model.padded_vocab_size is not None:
        return recipe.model.padded_vocab_size
    raise UserError(
        f"{recipe.data.tokenizer}: no such tokenizer folder, and the vocabulary's size is needed; name one with"
        " data.tokenizer=DIR, or give model.padded_vocab_size=N"
    )
