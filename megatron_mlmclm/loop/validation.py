"""An evaluation's results: Megatron's `non_loss_data_func`, called on every rank after its forward passes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from megatron_mlmclm.loop.forward import ForwardStep

PSEUDO = "pll"  # the view in which each position is hidden in turn


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found, by objective.

    Attributes:
        losses: nats per predicted token.
        accuracies: share of predicted tokens that were the likeliest.
        perplexities: of clm, and the pseudo-perplexity (Salazar et al., arXiv 1910.14659) where it was asked for.
    """

    losses: dict[str, float]
    accuracies: dict[str, float]
    perplexities: dict[str, float]


Report = Callable[[int, Evaluation], None]


def collector(forward_step: ForwardStep, report: Report | None) -> Callable[[object], None]:
    """A `non_loss_data_func`: reduce what `forward_step` added up over the data parallel ranks.

    Calls `report(consumed_train_samples, evaluation)`; None: another rank's job. Sums and counts are float64, exact to
    2**53 tokens; Megatron's own are float32.
    """

    def collect(_model: Sequence[torch.nn.Module]) -> None:
        if not parallel_state.is_pipeline_last_stage():
            return
        names = sorted(forward_step.evaluated)
        sums = torch.stack([forward_step.evaluated[name] for name in names])
        forward_step.evaluated.clear()
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if report is not None:
            report(get_args().consumed_train_samples, _evaluation(dict(zip(names, sums.tolist(), strict=True))))

    return collect


def _evaluation(sums: dict[str, list[float]]) -> Evaluation:
    """From (loss, right answers, count) of each objective."""
    losses = {name: loss / count for name, (loss, _, count) in sums.items() if count}
    accuracies = {name: right / count for name, (_, right, count) in sums.items() if count}
    names = {"clm": "clm", PSEUDO: "pseudo"}
    perplexities = {said: _exp(losses[name]) for name, said in names.items() if name in losses}
    for found in (losses, accuracies):
        found.pop(PSEUDO, None)
    return Evaluation(losses, accuracies, perplexities)


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # a run that blew up has no perplexity worth a crash
