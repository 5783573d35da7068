"""The loss at predicted positions only, under tensor and sequence parallelism (DESIGN 4a.6)."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

HIDDEN_BY_SOFTMAX = -1e30  # exp() of it is zero against any real logit


@dataclass(frozen=True)
class PredictedRows:
    """Which rows of a micro-batch [s, b] are predicted. C is a multiple of the phase's capacity.

    Attributes:
        rows: positions in the flattened [s * b] order, int64 [C]; padding repeats row 0.
        targets: the token to predict there, int64 [C].
        weights: the factor of the row's loss, float32 [C]; 0 for padding.
        parts: which of the phase's objectives predicts it, int64 [C].
        count: real rows, the first of the C.
        vocab_size: real size; columns from there on are Megatron's padding and take no part in the softmax.
    """

    rows: Tensor
    targets: Tensor
    weights: Tensor
    parts: Tensor
    count: int
    vocab_size: int

    def to(self, device: torch.device | int) -> "PredictedRows":
        """The same rows on `device`."""
        tensors = (self.rows, self.targets, self.weights, self.parts)
        moved = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return PredictedRows(*moved, self.count, self.vocab_size)


def select_rows(
    predicted: Tensor,
    labels: Tensor,
    capacity: int,
    vocab_size: int,
    weights: Tensor | None = None,
    parts: Tensor | None = None,
) -> PredictedRows:
    """Gather what is predicted in a micro-batch: `predicted` bool [b, s], `labels` int64 [b, s], on the CPU.

    `weights` [b] and `parts` int64 [b] are those of the sequences (None: 1 and 0). Shapes stay static: rows are padded
    to `capacity`. A micro-batch with more predicted positions takes the next multiple of it, so nothing is ever
    dropped.
    """
    batch = len(predicted)
    rows = predicted.t().reshape(-1).nonzero().squeeze(1)
    targets = labels.t().reshape(-1)[rows]
    sequences = rows % batch
    count = rows.numel()
    padding = (0, max(1, -(-count // capacity)) * capacity - count)
    factors = torch.ones(count) if weights is None else weights.float()[sequences]
    numbers = torch.zeros_like(rows) if parts is None else parts[sequences]
    rows, targets, factors, numbers = (
        torch.nn.functional.pad(tensor, padding) for tensor in (rows, targets, factors, numbers)
    )
    return PredictedRows(rows, targets, factors, numbers, count, vocab_size)


def masked_loss(
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    context: PredictedRows,
    **_: Any,
) -> Tensor:
    """An `output_processor` for `GPTModel.forward`: weighted cross entropy in nats at the rows of `context`, [C].

    float32. `hidden_states` is [s, b, h], or [s / tp, b, h] under sequence parallelism. Padding rows give 0.
    """
    logits = predicted_logits(hidden_states, output_layer, output_weight, context.rows).float()
    logits = _hide_padding(logits, output_layer, context.vocab_size)
    return _cross_entropy(logits, output_layer, context)


def masked_scores(
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    context: PredictedRows,
    **_: Any,
) -> Tensor:
    """As `masked_loss`, for evaluation: [2, C], the loss and whether the likeliest token is the target (1 or 0)."""
    logits = predicted_logits(hidden_states, output_layer, output_weight, context.rows).float()
    logits = _hide_padding(logits, output_layer, context.vocab_size)
    right = _likeliest(logits, output_layer) == context.targets
    real = torch.arange(len(right), device=right.device) < context.count
    # The cross entropy works in place: it comes last.
    return torch.stack([_cross_entropy(logits, output_layer, context), (right & real).float()])


def _cross_entropy(logits: Tensor, output_layer: ColumnParallelLinear, context: PredictedRows) -> Tensor:
    loss = vocab_parallel_cross_entropy(logits, context.targets.unsqueeze(1), tp_group=output_layer.tp_group)
    return loss.squeeze(1) * context.weights


def _likeliest(logits: Tensor, output_layer: ColumnParallelLinear) -> Tensor:
    """The token with the largest logit over all vocabulary slices, int64 [C]; of equals the first."""
    group = output_layer.tp_group
    best, token = logits.squeeze(1).max(dim=-1)
    highest = best.clone()
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    token = token + group.rank() * logits.shape[-1]
    token = torch.where(best == highest, token, torch.iinfo(token.dtype).max)
    torch.distributed.all_reduce(token, op=torch.distributed.ReduceOp.MIN, group=group)
    return token


def predicted_logits(
    hidden_states: Tensor, output_layer: ColumnParallelLinear, output_weight: Tensor | None, rows: Tensor
) -> Tensor:
    """This rank's vocabulary slice of the logits at `rows`: [C, 1, padded_vocab / tp]."""
    sequence_parallel = output_layer.sequence_parallel
    if sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )
    selected = hidden_states.reshape(-1, hidden_states.shape[-1]).index_select(0, rows).unsqueeze(1)
    if not sequence_parallel:
        return output_layer(selected, weight=output_weight)[0]
    # The layer's own forward would add a second reduction in backward: the loss would be right and every gradient
    # below the head wrong by a factor of tp. Gathered whole, the rows need one all-reduce of their gradient.
    return linear_with_grad_accumulation_and_async_allreduce(
        selected,
        output_layer.weight if output_weight is None else output_weight,
        None,
        output_layer.gradient_accumulation_fusion,
        allreduce_dgrad=True,
        sequence_parallel=False,
        tp_group=output_layer.tp_group,
    )


def _hide_padding(logits: Tensor, output_layer: ColumnParallelLinear, vocab_size: int) -> Tensor:
    """Take the padded columns (those of the last ranks) out of the softmax."""
    columns = logits.shape[-1]
    real = min(max(vocab_size - output_layer.tp_group.rank() * columns, 0), columns)
    if real == columns:
        return logits
    padding = logits.new_full((*logits.shape[:-1], columns - real), HIDDEN_BY_SOFTMAX)
    return torch.cat([logits[..., :real], padding], dim=-1)
