"""What a recipe costs, from the recipe alone: weights, tokens, predicted tokens, FLOPs; and phases cut to a budget."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.load import find_recipe, load_recipe
from megatron_mlmclm.recipe.phase import MaskRatio, PartSection, PhaseSection, RatioSchedule, steps_of
from megatron_mlmclm.recipe.schema import ModelSection, Recipe

KINDS = ("tokens", "predicted tokens", "FLOPs")
MOST_STEPS = 2**24  # a phase that needs more to meet a budget was given the wrong one


@dataclass(frozen=True)
class Parameters:
    """Counts of weights; the names of the paper's sizes count `layers` + `embedding`."""

    layers: int  # everything but embedding and head
    embedding: int
    head: int  # 0 where it is tied to the embedding

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.embedding + self.head


@dataclass(frozen=True)
class Cost:
    """Tokens read, tokens predicted (expected), and FLOPs of forward and backward by what takes them.

    `body`: the layers' weights; `attention`: scores and their sums over values; `head`: the output layer at predicted
    tokens.
    """

    tokens: float = 0.0
    predicted: float = 0.0
    body: float = 0.0
    attention: float = 0.0
    head: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def flops(self) -> float:
        """All of them."""
        return self.body + self.attention + self.head

    def of(self, kind: str) -> float:
        """The one of `KINDS`."""
        return {"tokens": self.tokens, "predicted tokens": self.predicted, "FLOPs": self.flops}[kind]


def parameters(model: ModelSection, rows: int) -> Parameters:
    """Weights of a model whose embedding has `rows` rows."""
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * model.ffn_hidden_size + 2 * hidden
    layer += model.add_qkv_bias * (queries + 2 * keys) + model.qk_layernorm * 2 * model.head_dim
    embedding = rows * hidden
    return Parameters(model.num_layers * layer + hidden, embedding, 0 if model.tie_embeddings else embedding)


def training_cost(model: ModelSection, rows: int, tokens: float, predicted: float, *, seen: float) -> Cost:
    """What forward and backward over `tokens` cost, of which `predicted` reach the head.

    Six FLOPs per weight and token (two forward, four backward); attention scores and their sum over values cost
    12 * layers * heads * head_dim * seq_length a token, times the share `seen` of pairs of positions that may see each
    other: 1 where all do, 1/2 under causal attention. What is recomputed does not count.
    """
    scores = 12 * model.num_layers * model.num_attention_heads * model.head_dim * model.seq_length
    body = tokens * 6 * parameters(model, rows).layers
    return Cost(tokens, predicted, body, tokens * scores * seen, predicted * 6 * rows * model.hidden_size)


def phase_cost(recipe: Recipe, phase: PhaseSection, steps: int, rows: int, until: int | None = None) -> Cost:
    """What the first `until` (all, where None) of the phase's `steps` steps cost.

    Expectations: a mixed phase costs the share-weighted mean of its parts, an alternating one what each step's part
    does, diffusion the middle of its range. Attention counts as if documents saw each other; padding counts as tokens.
    Special tokens, which are never chosen, are not taken off. Frozen weights count like others, though a backward pass
    through them alone is cheaper.
    """
    done = steps if until is None else until
    batch = phase.batch or recipe.batch
    tokens = done * batch.global_batch_size * recipe.model.seq_length
    predicted, seen = (float(share[:done].mean()) for share in _shares(phase, steps, recipe.model))
    return training_cost(recipe.model, rows, tokens, tokens * predicted, seen=seen)


def recipe_cost(recipe: Recipe, rows: int, but: int | None = None) -> Cost:
    """What all phases cost (but the one of number `but`); the run of a checkpoint that it starts from is not counted.

    Raises:
        UserError: a phase has no length.
    """
    total = Cost()
    for number, phase in enumerate(recipe.phases):
        if number == but:
            continue
        steps = steps_of(phase, phase.batch or recipe.batch, recipe.model.seq_length)
        if steps is None:
            raise UserError(f"{recipe.name}: phases.{number} has no length: give it steps, tokens or samples")
        total += phase_cost(recipe, phase, steps, rows)
    return total


def ratios(ratio: MaskRatio | None, steps: int) -> np.ndarray:
    """The masking ratio at each of a phase's `steps` steps, float64 [steps]; [1] where it doesn't move.

    A range counts its middle, and what masks nothing (None) predicts everything: 1.
    """
    if not isinstance(ratio, RatioSchedule):
        return np.atleast_1d(1.0 if ratio is None else np.mean(ratio))
    step = np.arange(steps)
    if ratio.at is not None:
        firsts = sorted(ratio.at)
        table = np.array([ratio.at[first] for first in firsts])
        return table[np.searchsorted(firsts, step, side="right") - 1]
    last = (ratio.steps or steps) - 1
    way = np.minimum(step / last, 1.0) if last else np.ones(steps)  # both ends are reached
    if ratio.shape == "cosine":
        way = (1.0 - np.cos(np.pi * way)) / 2.0
    return ratio.start + (ratio.end - ratio.start) * way


def turns(phase: PhaseSection, steps: int) -> list[np.ndarray]:
    """How much of each step each of `phase.views` gets, float64 [steps] or [1]. They sum to 1."""
    if phase.objective == "mixed":
        total = sum(part.share for part in phase.parts)
        return [np.atleast_1d(part.share / total) for part in phase.parts]
    if phase.objective == "alternating":
        ends = np.cumsum([part.steps for part in phase.parts])  # the periods repeat from the phase's first step
        turn = np.searchsorted(ends, np.arange(steps) % ends[-1], side="right")
        return [(turn == number).astype(float) for number in range(len(ends))]
    return [np.ones(1)]


def _shares(phase: PhaseSection, steps: int, model: ModelSection) -> tuple[np.ndarray, np.ndarray]:
    """Of the tokens, what is predicted, and of the pairs of positions, what is seen: each [steps] or [1]."""
    predicted = seen = np.zeros(1)
    for view, turn in zip(phase.views, turns(phase, steps), strict=True):
        predicted = predicted + turn * _predicted(view, steps)
        seen = seen + turn * _seen_in_window(view, model)
    return predicted, seen


def _predicted(view: PartSection, steps: int) -> np.ndarray:
    """A prefix, drawn evenly between its bounds, is read and not predicted."""
    return np.atleast_1d(1.0 - np.mean(view.prefix)) if view.prefix else ratios(view.mask_ratio, steps)


def _seen_in_window(view: PartSection, model: ModelSection) -> float:
    """As `_seen`, where layers have a window: a position sees so many to its left and right, fewer near the ends."""
    whole = _seen(view)
    if model.window_size is None:
        return whole
    length = model.seq_length
    left, right = (length - 1 if side < 0 else min(side, length - 1) for side in model.window_size)
    if view.direction == "causal":
        right = 0
    pairs = length * (left + right + 1) - left * (left + 1) / 2 - right * (right + 1) / 2
    every = model.global_attn_every_n_layers
    layers_without = -(-model.num_layers // every) / model.num_layers if every else 0.0
    return layers_without * whole + (1.0 - layers_without) * pairs / length**2


def _seen(view: PartSection) -> float:
    """The share of all pairs of positions that may see each other.

    A prefix that is a share p of S positions: its pS positions see each other, p^2 S^2 pairs. The position at i > pS
    sees the i positions up to itself: about (S^2 - p^2 S^2) / 2 pairs. Together p^2 + (1 - p^2) / 2 = (1 + p^2) / 2 of
    S^2, between causal (p = 0) and bidirectional (p = 1). For p even on [a, b] the mean of p^2 is (a^2 + ab + b^2) / 3.
    """
    if view.prefix:
        low, high = view.prefix
        return (1.0 + (low * low + low * high + high * high) / 3.0) / 2.0
    return 0.5 if view.direction == "causal" else 1.0


def settled(recipe: Recipe, rows: int) -> Recipe:
    """The recipe with every length that `compute` leaves open filled in; the recipe itself where there is none.

    `rows`: of its vocabulary. The recipe that `compute.to` names has the same where it has the same tokenizer or no
    padded_vocab_size. It is not read where no length is open, so that a settled recipe stands alone.

    Raises:
        UserError: `compute.to` can't be read or leads back to itself; the budget can't be met; a length is missing.
    """
    return _settled(recipe, rows, ())


def _settled(recipe: Recipe, rows: int, way: Sequence[str]) -> Recipe:
    """`way`: the recipes whose budgets are being looked up."""
    if recipe.compute is None or not _open_phases(recipe):
        return recipe
    to = str(find_recipe(recipe.compute.to).resolve())
    if to in way:
        raise UserError(f"compute.to: {recipe.compute.to} takes its budget from itself in the end; give it lengths")
    reference = load_recipe(recipe.compute.to)
    same = reference.data.tokenizer == recipe.data.tokenizer
    its_rows = rows if same else reference.model.padded_vocab_size or rows
    return settle(recipe, rows, recipe_cost(_settled(reference, its_rows, (*way, to)), its_rows))


def settle(recipe: Recipe, rows: int, reference: Cost) -> Recipe:
    """Give the one phase without a length the steps (at least 1) that bring `recipe` nearest to `reference`'s budget.

    Raises:
        UserError: several phases have no length, the others spend the budget, or it is out of all proportion.
    """
    kind, missing = recipe.compute.equal, _open_phases(recipe)
    if len(missing) != 1:
        numbers = ", ".join(f"phases.{number}" for number in missing)
        raise UserError(f"compute gives one phase its length, {numbers} have none: give steps, tokens or samples")
    number, phase = missing[0], recipe.phases[missing[0]]
    budget, spent = reference.of(kind), recipe_cost(recipe, rows, but=number).of(kind)
    if spent >= budget:
        raise UserError(
            f"compute: {recipe.compute.to} has {budget:.4g} {kind}, the phases with a length take {spent:.4g} of them:"
            f" nothing is left for phases.{number}; shorten them"
        )

    def cost(steps: int) -> float:
        return phase_cost(recipe, phase, steps, rows).of(kind)

    steps = _nearest(cost, budget - spent)
    if steps is None:
        raise UserError(
            f"compute: {recipe.compute.to} has {budget:.4g} {kind}; phases.{number} would need more than {MOST_STEPS:,}"
            " steps for them: take larger batches or another compute.to"
        )
    phases = list(recipe.phases)
    phases[number] = phase.model_copy(update={"steps": steps})
    return recipe.model_copy(update={"phases": phases})


def _open_phases(recipe: Recipe) -> list[int]:
    lengths = [(phase.steps, phase.tokens, phase.samples) for phase in recipe.phases]
    return [number for number, length in enumerate(lengths) if length == (None, None, None)]


def _nearest(cost: Callable[[int], float], target: float) -> int | None:
    """The whole number from 1 whose `cost`, which rises, is nearest to `target`; None if above `MOST_STEPS`."""
    high = 1
    while cost(high) < target:
        high *= 2
        if high > MOST_STEPS:
            return None
    low = high // 2  # costs less than the target, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < target else (low, middle)
    return high if low == 0 or cost(high) - target <= target - cost(low) else low
