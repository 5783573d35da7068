"""The start and the end of a training step.

Megatron's loop has no callback, so the module global `megatron.training.training.train_step` is wrapped: the one patch
outside platform/ (reference: train() looks the name up at each step).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from megatron.training import get_args, training

TOTAL = "loss"  # of a phase with several objectives, beside each one's own


@dataclass(frozen=True)
class StepResult:
    """One finished step.

    Attributes:
        step: 1-based.
        first_sample: the run's index of the step's first sample.
        losses: reported values by name, in nats per predicted token; empty except on the last pipeline stage.
        lr: the learning rate the step was taken with.
        grad_norm: before clipping; None where unknown.
        seconds: wall time of the step.
        peak_memory: most bytes that tensors held on this rank's device so far; 0 on a CPU.
    """

    step: int
    first_sample: int
    losses: dict[str, float]
    lr: float
    grad_norm: float | None
    seconds: float
    peak_memory: int


@dataclass(frozen=True)
class StepStart:
    """A step that is about to begin: `step` is 1-based, `first_sample` the run's index of its first sample."""

    step: int
    first_sample: int
    chunks: Sequence[torch.nn.Module]
    optimizer: Any  # a MegatronOptimizer
    scheduler: Any  # an OptimizerParamScheduler


def wrap_train_step(on_start: Callable[[StepStart], None], on_end: Callable[[StepResult], None]) -> None:
    """On every rank, call `on_start` before each step and `on_end` after it."""
    inner = training.train_step

    @wraps(inner)
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *rest: Any,
        iteration: int,
        **kwargs: Any,
    ) -> tuple:
        first_sample = get_args().consumed_train_samples
        on_start(StepStart(iteration + 1, first_sample, model, optimizer, opt_param_scheduler))
        lr = float(optimizer.param_groups[0]["lr"])
        began = time.perf_counter()
        result = inner(
            forward_step_func,
            data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            *rest,
            iteration=iteration,
            **kwargs,
        )
        losses = _present(_read(result[0]))
        grad_norm = None if result[5] is None else float(result[5])
        seconds, peak_memory = time.perf_counter() - began, torch.cuda.max_memory_allocated()
        on_end(StepResult(iteration + 1, first_sample, losses, lr, grad_norm, seconds, peak_memory))
        return ({name: result[0][name] for name in losses}, *result[1:])

    training.train_step = train_step


def _read(losses: dict[str, torch.Tensor]) -> dict[str, float]:
    """All at once: the step's one wait for the device that is ours. Megatron's own has waited for the gradient norm."""
    return dict(zip(losses, torch.stack([*losses.values()]).tolist(), strict=True)) if losses else {}


def _present(losses: dict[str, float]) -> dict[str, float]:
    """Without the objectives that no sample of the step was for: 0 / 0. A loss that blew up has a total that did."""
    if math.isnan(losses.get(TOTAL, math.nan)):
        return losses
    return {name: loss for name, loss in losses.items() if not math.isnan(loss)}


def set_rate(start: StepStart, rate: float) -> None:
    """Take the step with learning rate `rate`, per unit of a parameter group's own peak, whatever Megatron's rule says.

    Megatron's scheduler then asks for the rate of the next step too, and saves it: the number of samples it has seen is
    set here as well, since it does not count steps that were skipped.
    """
    start.scheduler.get_lr = lambda group: rate * group["max_lr"]
    start.scheduler.num_steps = start.first_sample
    start.scheduler.step(0)
