"""What a recipe will do, computed from the recipe alone: parameters, tokens, predicted tokens, FLOPs, learning rate."""

from dataclasses import dataclass
from pathlib import Path

from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe, learning_rate
from megatron_mlmclm.recipe.schema import ModelSection


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
class PhasePlan:
    """One phase in numbers. `lr` is at its first and last step; FLOPs are those of forward and backward."""

    name: str
    objective: str
    attention: str
    mask_ratio: float | None
    first_step: int
    steps: int
    tokens: int
    predicted: float
    flops: float
    lr: tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """A run in numbers."""

    name: str
    parameters: Parameters
    tokens_per_step: int
    phases: tuple[PhasePlan, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Tokens read."""
        return sum(phase.tokens for phase in self.phases)

    @property
    def predicted(self) -> float:
        """Tokens predicted, expected."""
        return sum(phase.predicted for phase in self.phases)

    @property
    def flops(self) -> float:
        """Floating point operations of forward and backward."""
        return sum(phase.flops for phase in self.phases)


def plan(recipe: Recipe) -> Plan:
    """Compute the plan of `recipe`. Neither its data nor megatron is needed.

    Raises:
        UserError: the vocabulary is not known: no padded_vocab_size, and no tokenizer folder.
    """
    model, rows = recipe.model, _vocabulary_rows(recipe)
    per_step = recipe.batch.global_batch_size * model.seq_length
    phases, first = [], 1
    for phase in recipe.phases:
        tokens = phase.steps * per_step
        predicted = tokens * (phase.mask_ratio or 1.0)
        attention = phase.attention or ("causal" if phase.objective == "clm" else "bidirectional")
        last = first + phase.steps - 1
        phases.append(
            PhasePlan(
                name=phase.name or phase.objective,
                objective=phase.objective,
                attention=attention,
                mask_ratio=phase.mask_ratio,
                first_step=first,
                steps=phase.steps,
                tokens=tokens,
                predicted=predicted,
                flops=training_flops(model, rows, tokens, predicted, causal=attention == "causal"),
                lr=(learning_rate(recipe, first), learning_rate(recipe, last)),
            )
        )
        first = last + 1
    return Plan(recipe.name, parameters(model, rows), per_step, tuple(phases))


def parameters(model: ModelSection, rows: int) -> Parameters:
    """Weights of a model whose embedding has `rows` rows."""
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * model.ffn_hidden_size + 2 * hidden
    embedding = rows * hidden
    return Parameters(model.num_layers * layer + hidden, embedding, 0 if model.tie_embeddings else embedding)


def training_flops(model: ModelSection, rows: int, tokens: float, predicted: float, *, causal: bool) -> float:
    """FLOPs of forward and backward over `tokens`, of which `predicted` reach the head.

    Six per weight and token (two forward, four backward); attention scores and their sum over values cost
    12 * layers * heads * head_dim * seq_length a token, half of it under causal attention.
    """
    weights = parameters(model, rows).layers
    scores = 12 * model.num_layers * model.num_attention_heads * model.head_dim * model.seq_length
    return tokens * (6 * weights + scores * (0.5 if causal else 1.0)) + predicted * 6 * rows * model.hidden_size


def _vocabulary_rows(recipe: Recipe) -> int:
    """Rows that count: the tokenizer's, or the padded size where no tokenizer is at hand."""
    if Path(recipe.data.tokenizer).is_dir():
        return Tokenizer.load(recipe.data.tokenizer).vocab_size
    if recipe.model.padded_vocab_size is not None:
        return recipe.model.padded_vocab_size
    raise UserError(
        f"{recipe.data.tokenizer}: no such tokenizer folder, and the vocabulary's size is needed; name one with"
        " data.tokenizer=DIR, or give model.padded_vocab_size=N"
    )
