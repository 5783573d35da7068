"""Collecting an evaluation's losses: Megatron's `non_loss_data_func`, called on every rank after its forward passes."""

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state

from megatron_mlmclm.loop.forward import ForwardStep


def collector(forward_step: ForwardStep, report: Callable[[dict[str, float]], None] | None) -> Callable[[object], None]:
    """A `non_loss_data_func`: reduce what `forward_step` added up over the data parallel ranks; `report` it.

    Sums and counts are float64, exact to 2**53 tokens; Megatron's own are float32. `report` None: another rank's job.
    """

    def collect(_model: Sequence[torch.nn.Module]) -> None:
        if not parallel_state.is_pipeline_last_stage():
            return
        names = sorted(forward_step.evaluated)
        sums = torch.stack([forward_step.evaluated[name] for name in names])
        forward_step.evaluated.clear()
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if report is not None:
            report({name: float(total / count) for name, (total, count) in zip(names, sums, strict=True)})

    return collect
