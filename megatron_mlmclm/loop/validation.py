"""Collecting an evaluation's losses: Megatron's `non_loss_data_func`, called on every rank after its forward passes."""

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from megatron_mlmclm.loop.forward import ForwardStep

Report = Callable[[int, dict[str, float]], None]


def collector(forward_step: ForwardStep, report: Report | None) -> Callable[[object], None]:
    """A `non_loss_data_func`: reduce what `forward_step` added up over the data parallel ranks.

    Calls `report(consumed_train_samples, losses)`; None: another rank's job. Sums and counts are float64, exact to
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
            losses = {name: float(total / count) for name, (total, count) in zip(names, sums, strict=True)}
            report(get_args().consumed_train_samples, losses)

    return collect
