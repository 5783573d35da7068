"""What a rank holds in memory, from the recipe alone: the state that grows with the model, and the loss's logits."""

from dataclasses import dataclass

from megatron_mlmclm.recipe import Recipe
from megatron_mlmclm.recipe.budget import parameters

FULL = 4  # bytes of a float32


@dataclass(frozen=True)
class State:
    """Bytes on the rank that holds most, of a run with one data parallel rank; `optimizer` is shared among them all.

    `logits`: of one micro-batch, were those of all positions to stand at once, in float32, as Megatron's loss has them.
    """

    weights: float
    gradients: float
    optimizer: float
    logits: float


def rank_state(recipe: Recipe, rows: int) -> State:
    """Of `recipe`, whose embedding has `rows` rows.

    Layers are split over tensor and pipeline ranks, embedding and head over tensor ranks; one pipeline stage has both
    where there is no other. Gradients are float32. The optimizer has two moments, and under bf16 float32 weights.
    """
    counts, parallel = parameters(recipe.model, rows), recipe.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ends = counts.embedding + counts.head if pp == 1 else counts.embedding
    weights = counts.layers / (tp * pp) + ends / tp
    half = recipe.precision != "fp32"
    positions = recipe.batch.micro_batch_size * recipe.model.seq_length // parallel.context_parallel_size
    return State(
        weights=weights * (FULL // 2 if half else FULL),
        gradients=weights * FULL,
        optimizer=weights * FULL * (3 if half else 2),
        logits=positions * rows / tp * FULL,
    )
