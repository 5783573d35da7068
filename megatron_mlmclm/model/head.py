"""The loss at predicted positions only, under tensor and sequence parallelism (DESIGN 4a.6)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import layers, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_mlmclm.model.chunked import MainGrad, Slice, chunked_cross_entropy, scores
from megatron_mlmclm.model.fused import fused_cross_entropy, has_fused_loss

Head = Literal["auto", "whole", "chunked", "fused", "dense"]
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


def form_of(head: Head, tensor_parallel: int) -> Head:
    """How the logits are had where the recipe asks for `head`, over so many tensor parallel ranks."""
    if head != "auto":
        return head
    return "fused" if tensor_parallel == 1 and has_fused_loss() else "chunked"


def masked_loss(
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    context: PredictedRows,
    head: Head = "auto",
    **_: Any,
) -> Tensor:
    """An `output_processor` for `GPTModel.forward`: weighted cross entropy in nats at the rows of `context`, [C].

    float32. `hidden_states` is [s, b, h], or [s / tp, b, h] under sequence parallelism. Padding rows give 0.
    `head`: the logits stand a chunk of rows at a time, by our arithmetic ("chunked") or Liger's ("fused"); or, "whole",
    at once; or, "dense", those of all positions, as Megatron's own loss has them. The losses are the same.
    """
    weight = output_layer.weight if output_weight is None else output_weight
    form = form_of(head, output_layer.tp_group.size())
    if form == "dense":
        return _dense_loss(hidden_states, output_layer, output_weight, context)
    if form == "chunked":
        part = Slice.of(len(weight), context.vocab_size, output_layer.tp_group)
        selected = _selected(hidden_states, output_layer, context.rows)
        main_grad = _main_grad(output_layer) if output_weight is None else None  # a shared weight's has two parts
        return chunked_cross_entropy(selected, weight, context.targets, context.weights, part, main_grad)
    if form == "fused":
        selected = _selected(hidden_states, output_layer, context.rows)
        return fused_cross_entropy(selected, weight[: context.vocab_size], context.targets, context.weights)
    logits = predicted_logits(hidden_states, output_layer, output_weight, context.rows).float()
    return _cross_entropy(logits, output_layer, context.targets, context.vocab_size) * context.weights


def masked_scores(
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    context: PredictedRows,
    **_: Any,
) -> Tensor:
    """As `masked_loss`, for evaluation: [2, C], the loss and whether the likeliest token is the target (1 or 0)."""
    weight = output_layer.weight if output_weight is None else output_weight
    part = Slice.of(len(weight), context.vocab_size, output_layer.tp_group)
    selected = _selected(hidden_states, output_layer, context.rows)
    loss, likeliest = scores(selected, weight, context.targets, part)
    real = torch.arange(len(loss), device=loss.device) < context.count
    return torch.stack([loss * context.weights, ((likeliest == context.targets) & real).float()])


def _main_grad(output_layer: ColumnParallelLinear) -> MainGrad | None:
    """Where the layer's own backward would add up its weight's gradient, if it does not give it to autograd."""
    if not output_layer.gradient_accumulation_fusion or not hasattr(output_layer.weight, "main_grad"):
        return None
    scaled, weight = output_layer.config.grad_scale_func, output_layer.weight
    scale = 1.0 if scaled is None else scaled(torch.ones(1, device=weight.device))
    kernels = layers.fused_weight_gradient_mlp_cuda
    full = weight.main_grad.dtype == torch.float32
    return MainGrad(weight, kernels.wgrad_gemm_accum_fp32 if full else kernels.wgrad_gemm_accum_fp16, scale)


def _dense_loss(
    hidden_states: Tensor, output_layer: ColumnParallelLinear, output_weight: Tensor | None, context: PredictedRows
) -> Tensor:
    """The loss of every position, of which the predicted ones are kept."""
    hidden = hidden_states.shape[0] * hidden_states.shape[1]
    positions = hidden * output_layer.tp_group.size() if output_layer.sequence_parallel else hidden
    everything = torch.arange(positions, device=hidden_states.device)
    targets = torch.zeros_like(everything)
    targets[context.rows[: context.count]] = context.targets[: context.count]
    logits = predicted_logits(hidden_states, output_layer, output_weight, everything).float()
    return _cross_entropy(logits, output_layer, targets, context.vocab_size)[context.rows] * context.weights


def _cross_entropy(logits: Tensor, output_layer: ColumnParallelLinear, targets: Tensor, vocab_size: int) -> Tensor:
    """[C] of logits [C, 1, columns], which it overwrites."""
    logits = _hide_padding(logits, output_layer, vocab_size)
    return vocab_parallel_cross_entropy(logits, targets.unsqueeze(1), tp_group=output_layer.tp_group).squeeze(1)


def _selected(hidden_states: Tensor, output_layer: ColumnParallelLinear, rows: Tensor) -> Tensor:
    """The hidden states at `rows`, [C, h], on every rank of the tensor parallel group."""
    if output_layer.sequence_parallel:
        # The gradient of what is gathered is expected whole on every rank, as the heads below give it.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )
    return hidden_states.reshape(-1, hidden_states.shape[-1]).index_select(0, rows)


def predicted_logits(
    hidden_states: Tensor, output_layer: ColumnParallelLinear, output_weight: Tensor | None, rows: Tensor
) -> Tensor:
    """This rank's vocabulary slice of the logits at `rows`: [C, 1, padded_vocab / tp]."""
    selected = _selected(hidden_states, output_layer, rows).unsqueeze(1)
    if not output_layer.sequence_parallel:
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
