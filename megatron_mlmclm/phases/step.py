"""The start and the end of a training step.

Megatron's loop has no callback, so the module global `megatron.training.training.train_step` is wrapped: the one patch
outside platform/ (reference: train() looks the name up at each step).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from megatron.training import get_args, training


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


StartHook = Callable[[int, int, Sequence[torch.nn.Module]], None]


def wrap_train_step(on_start: StartHook, on_end: Callable[[StepResult], None]) -> None:
    """On every rank, call `on_start(step, first_sample, model_chunks)` before each step and `on_end(result)` after."""
    inner = training.train_step

    @wraps(inner)
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        *rest: Any,
        iteration: int,
        **kwargs: Any,
    ) -> tuple:
        first_sample = get_args().consumed_train_samples
        on_start(iteration + 1, first_sample, model)
        lr = float(optimizer.param_groups[0]["lr"])
        began = time.perf_counter()
        result = inner(forward_step_func, data_iterator, model, optimizer, *rest, iteration=iteration, **kwargs)
        losses = {name: float(value) for name, value in result[0].items()}
        grad_norm = None if result[5] is None else float(result[5])
        seconds, peak_memory = time.perf_counter() - began, torch.cuda.max_memory_allocated()
        on_end(StepResult(iteration + 1, first_sample, losses, lr, grad_norm, seconds, peak_memory))
        return result

    training.train_step = train_step
