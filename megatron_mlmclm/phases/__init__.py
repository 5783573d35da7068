"""When: the timeline of phases, the start and end of a step, the optimizer at a phase's edge.

What needs megatron imports it when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_mlmclm.phases.choice import Choice, alternating, mixed
from megatron_mlmclm.phases.timeline import Phase, Timeline, View

if TYPE_CHECKING:
    from megatron_mlmclm.phases.optimizer import Freezer, reset_optimizer, set_hyperparameters
    from megatron_mlmclm.phases.step import TOTAL, StepResult, StepStart, set_rate, wrap_train_step

_HOME = {
    "Freezer": "optimizer",
    "StepResult": "step",
    "StepStart": "step",
    "TOTAL": "step",
    "reset_optimizer": "optimizer",
    "set_hyperparameters": "optimizer",
    "set_rate": "step",
    "wrap_train_step": "step",
}

__all__ = [
    "Choice",
    "Freezer",
    "Phase",
    "StepResult",
    "StepStart",
    "TOTAL",
    "Timeline",
    "View",
    "alternating",
    "mixed",
    "reset_optimizer",
    "set_hyperparameters",
    "set_rate",
    "wrap_train_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
