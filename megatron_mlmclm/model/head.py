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
        weights: 1 for a real row, 0 for padding, float32 [C].
        vocab_size: real size; columns from there on are Megatron's padding and take no part in the softmax.
    """

    rows: Tensor
    targets: Tensor
    weights: Tensor
    vocab_size: int

    def to(self, device: torch.device | int) -> "PredictedRows":
        """The same rows on `device`."""
        moved = (tensor.to(device, non_blocking=True) for tensor in (self.rows, self.targets, self.weights))
        return PredictedRows(*moved, self.vocab_size)


def select_rows(predicted: Tensor, labels: Tensor, capacity: int, vocab_size: int) -> PredictedRows:
    """Gather what is predicted in a micro-batch: `predicted` bool [b, s], `labels` int64 [b, s], on the CPU.

    Shapes stay static: rows are padded to `capacity`. A micro-batch with more predicted positions takes the next
    multiple of it, so nothing is ever dropped.
    """
    rows = predicted.t().reshape(-1).nonzero().squeeze(1)
    targets = labels.t().reshape(-1)[rows]
    count = rows.numel()
    padding = max(1, -(-count // capacity)) * capacity - count
    return PredictedRows(
        rows=torch.nn.functional.pad(rows, (0, padding)),
        targets=torch.nn.functional.pad(targets, (0, padding)),
        weights=torch.nn.functional.pad(torch.ones(count), (0, padding)),
        vocab_size=vocab_size,
    )


def masked_loss(
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    context: PredictedRows,
    **_: Any,
) -> Tensor:
    """An `output_processor` for `GPTModel.forward`: cross entropy in nats at the rows of `context`, float32 [C].

    `hidden_states` is [s, b, h], or [s / tp, b, h] under sequence parallelism. Padding rows give 0.
    """
    logits = predicted_logits(hidden_states, output_layer, output_weight, context.rows).float()
    logits = _hide_padding(logits, output_layer, context.vocab_size)
    loss = vocab_parallel_cross_entropy(logits, context.targets.unsqueeze(1), tp_group=output_layer.tp_group)
    return loss.squeeze(1) * context.weights


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
