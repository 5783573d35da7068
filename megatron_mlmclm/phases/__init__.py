"""When: the timeline of phases, and the start and end of a step. `wrap_train_step` imports megatron when first used."""

from typing import TYPE_CHECKING, Any

from megatron_mlmclm.phases.timeline import Phase, Timeline, View

if TYPE_CHECKING:
    from megatron_mlmclm.phases.step import StepResult, wrap_train_step

__all__ = ["Phase", "StepResult", "Timeline", "View", "wrap_train_step"]


def __getattr__(name: str) -> Any:
    if name in ("StepResult", "wrap_train_step"):
        from megatron_mlmclm.phases import step

        return getattr(step, name)
    raise AttributeError(name)
