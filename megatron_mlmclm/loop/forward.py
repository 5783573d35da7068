"""Megatron's forward step: a micro-batch through the model to (loss sum, count, report)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_mlmclm.attention import Extent, Pattern, cut_sequence, extent_of, pattern_params, set_pattern, verify
from megatron_mlmclm.model import Head, PredictedRows, masked_loss, masked_scores, select_rows
from megatron_mlmclm.phases import TOTAL, View

Report = dict[str, Tensor]
ROWS_ON_CPU = 16  # where no kernel or graph wants static shapes, predicted rows are padded to a multiple of this
PER_POSITION = ("inputs", "labels", "predicted", "positions")  # what is cut under context parallelism, [b, S]


class ForwardStep:
    """Called by Megatron's schedules once per micro-batch and model chunk, in training and in evaluation.

    `views` are the run's, numbered as the samples carry them; those from `first_measured` on are the validation's.
    `enter` says which views the phase trains: their losses are reported apart. In evaluation it also adds up each
    objective's loss, right answers and count in float64, for `Validation` to collect.
    """

    def __init__(self, views: Sequence[View], first_measured: int, vocab_size: int, head: Head) -> None:
        self._views = views
        self._first_measured = first_measured
        self._vocab_size = vocab_size
        self._loss_of = partial(masked_loss, head=head)
        self._trained = range(first_measured)
        self._patterns: dict[int, Pattern] = {}
        self.evaluated: dict[str, Tensor] = {}

    def enter(self, trained: range) -> None:
        """A phase begins whose views have these numbers."""
        self._trained = trained

    def __call__(self, data_iterator: Iterator, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        batch = next(data_iterator)
        numbers = self._trained if model.training else range(self._first_measured, len(self._views))
        self._check(batch["view"], numbers)
        attention = self._attention(batch, model)  # of whole sequences
        batch = _share(batch)
        device = torch.cuda.current_device()
        inputs = batch["inputs"].to(device, non_blocking=True)
        rows = self._rows(batch, numbers).to(device)
        output = model(
            inputs,
            batch["positions"].to(device, non_blocking=True),
            None,
            packed_seq_params=attention,
            output_processor=self._loss_of if model.training else masked_scores,
            output_processor_context=rows,
        )
        names = [self._views[number].name for number in numbers]
        return output, partial(self._loss if model.training else self._score, rows=rows, names=names)

    def attend(self, model: torch.nn.Module, pattern: Pattern) -> None:
        """Set the chunk's pattern if it is not set already. Within a training step all micro-batches share one."""
        if self._patterns.get(id(model)) != pattern:
            set_pattern([model], pattern)
            verify([model], pattern)
            self._patterns[id(model)] = pattern

    def _check(self, found: Tensor, numbers: range) -> None:
        if not all(number in numbers for number in found.tolist()):
            raise RuntimeError(f"a micro-batch has views {found.tolist()} of another phase: a phase edge inside a step")

    def _rows(self, batch: dict[str, Any], numbers: range) -> PredictedRows:
        present = {int(number) for number in batch["view"]}
        capacity = ROWS_ON_CPU
        if torch.cuda.is_available():
            capacity = max(self._views[number].objective.capacity(batch["inputs"].numel()) for number in present)
        parts = batch["view"] - numbers.start
        return select_rows(batch["predicted"], batch["labels"], capacity, self._vocab_size, batch["weight"], parts)

    def _attention(self, batch: dict[str, Any], model: torch.nn.Module) -> Any:
        """Set the pattern that all sequences share; give back what each has of its own, if anything."""
        views = [self._views[int(number)] for number in batch["view"]]
        patterns, seq_length = [view.pattern for view in views], batch["inputs"].shape[1]
        if not views[0].per_sample:
            if len(set(patterns)) > 1:
                raise RuntimeError("a micro-batch mixes patterns that are set for a whole step")
            self.attend(model, patterns[0])
        prefixes, documents = batch["prefix"].tolist(), batch.get("documents")
        if documents is not None:
            patterns = [replace(pattern, documents=True) for pattern in patterns]
            extents = [extent_of(row, prefix) for row, prefix in zip(documents, prefixes, strict=True)]
        elif patterns[0].documents:
            raise RuntimeError("the phase keeps documents apart, its samples do not say where they end")
        elif views[0].per_sample:
            extents = [Extent(seq_length, prefix=prefix) for prefix in prefixes]
        else:
            return None
        return pattern_params(patterns, seq_length, extents)

    def _loss(self, output: Tensor, *, rows: PredictedRows, names: list[str]) -> tuple[Tensor, Tensor, Report]:
        """(sum of losses, integer count of predicted tokens, report) as `calculate_per_token_loss` wants them."""
        loss_sum = output.float().sum()
        count = torch.tensor(rows.count, device=output.device)
        by_part = _by_part(output.detach().float()[None], rows, len(names))
        # Megatron wants the same keys of every micro-batch.
        report = {f"{name} loss": sums for name, sums in zip(names, by_part, strict=True)}
        if len(names) > 1:
            report[TOTAL] = torch.stack([loss_sum.detach(), count.float()])
        return loss_sum, count.int(), report

    def _score(self, output: Tensor, *, rows: PredictedRows, names: list[str]) -> tuple[Tensor, Tensor, Report]:
        """As `_loss`, of an evaluation; what Megatron is told is for its own log, `evaluated` is what counts."""
        by_part = _by_part(output.float(), rows, len(names))
        for name, sums in zip(names, by_part, strict=True):
            self.evaluated[name] = self.evaluated.get(name, 0.0) + sums.double()
        report = {f"{name} loss": sums[[0, -1]] for name, sums in zip(names, by_part, strict=True)}
        return output[0].float().sum(), torch.tensor(rows.count, device=output.device).int(), report


def _share(batch: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of a micro-batch under context parallelism, with the positions of what it has."""
    inputs = batch["inputs"]
    batch = {"positions": torch.arange(inputs.shape[1]).expand_as(inputs)} | batch
    if parallel_state.get_context_parallel_world_size() == 1:
        return batch
    group = parallel_state.get_context_parallel_group()
    return batch | {name: cut_sequence(batch[name], 1, group) for name in PER_POSITION}


def _by_part(values: Tensor, rows: PredictedRows, parts: int) -> Tensor:
    """Sums of `values` [k, C] over the rows of each part, and their number: [parts, k + 1]."""
    real = values[:, : rows.count]
    columns = torch.cat([real, torch.ones_like(real[:1])]).t()
    return columns.new_zeros(parts, columns.shape[1]).index_add(0, rows.parts[: rows.count], columns)
