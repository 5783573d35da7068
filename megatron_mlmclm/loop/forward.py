"""Megatron's forward step: a micro-batch through the model to (loss sum, count, report)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_mlmclm.attention import Pattern, set_pattern
from megatron_mlmclm.model import PredictedRows, masked_loss, select_rows
from megatron_mlmclm.phases import View

Report = dict[str, Tensor]


class ForwardStep:
    """Called by Megatron's schedules once per micro-batch and model chunk, in training and in evaluation.

    In evaluation it also adds up each objective's loss and count in float64, for `Validation` to collect.
    """

    def __init__(self, views: Sequence[View], validated: Sequence[str], vocab_size: int) -> None:
        self._views = views
        self._validated = validated  # names of the objectives that an evaluation measures
        self._vocab_size = vocab_size
        self._patterns: dict[int, Pattern] = {}
        self.evaluated: dict[str, Tensor] = {}

    def __call__(self, data_iterator: Iterator, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        batch = next(data_iterator)
        view = self._view_of(batch)
        self.attend(model, view.pattern)
        device = torch.cuda.current_device()
        inputs = batch["inputs"].to(device, non_blocking=True)
        capacity = view.objective.capacity(inputs.numel())
        rows = select_rows(batch["predicted"], batch["labels"], capacity, self._vocab_size).to(device)
        positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
        output = model(inputs, positions, None, output_processor=masked_loss, output_processor_context=rows)
        return output, partial(self._loss, rows=rows, name=view.objective.name, training=model.training)

    def attend(self, model: torch.nn.Module, pattern: Pattern) -> None:
        """Set the chunk's pattern if it is not set already. Within a training step all micro-batches share one."""
        if self._patterns.get(id(model)) != pattern:
            set_pattern([model], pattern)
            self._patterns[id(model)] = pattern

    def _view_of(self, batch: dict[str, Any]) -> View:
        numbers = batch["view"]
        if not (numbers == numbers[0]).all():
            raise RuntimeError(f"a micro-batch mixes views {numbers.tolist()}: a phase edge inside a step")
        return self._views[int(numbers[0])]

    def _loss(self, output: Tensor, *, rows: PredictedRows, name: str, training: bool) -> tuple[Tensor, Tensor, Report]:
        """(sum of losses, integer count of predicted tokens, report) as `calculate_per_token_loss` wants them."""
        loss_sum, count = output.float().sum(), rows.weights.sum()
        both = torch.stack([loss_sum.detach(), count])
        if training:
            return loss_sum, count.int(), {f"{name} loss": both}
        self.evaluated[name] = self.evaluated.get(name, 0.0) + both.double()
        # Megatron wants the same keys of every micro-batch.
        report = {f"{other} loss": both if other == name else torch.zeros_like(both) for other in self._validated}
        return loss_sum, count.int(), report
