"""What hangs on each training step: the phase it belongs to, and with it attention, learning rate and optimizer."""

from megatron_mlmclm.attention import verify, verify_per_sample
from megatron_mlmclm.loop.forward import ForwardStep
from megatron_mlmclm.loop.progress import Progress
from megatron_mlmclm.loop.request import Request
from megatron_mlmclm.phases import (
    Freezer,
    Phase,
    StepResult,
    StepStart,
    reset_optimizer,
    set_hyperparameters,
    set_rate,
)
from megatron_mlmclm.recipe import learning_rate


class Steps:
    """The hooks of a run. `progress` is None on the ranks that have no loss to tell."""

    def __init__(
        self, request: Request, forward_step: ForwardStep, freezer: Freezer, progress: Progress | None
    ) -> None:
        self._request = request
        self._forward_step = forward_step
        self._freezer = freezer
        self._progress = progress
        self._phase: Phase | None = None

    def start(self, start: StepStart) -> None:
        """Before a step."""
        recipe, phase = self._request.recipe, self._request.timeline.at(start.first_sample)
        if self._progress:
            self._progress.start(start.step, phase)
        if self._phase is None:  # the process begins: what a checkpoint says of the optimizer gives way to the recipe
            optimizer = recipe.optimizer
            betas = (optimizer.adam_beta1, optimizer.adam_beta2)
            set_hyperparameters(start.optimizer, betas=betas, eps=optimizer.adam_eps)
            self._freezer.attach(start.optimizer, start.chunks)
        if self._phase is not phase:
            self._enter(phase, start)
        if len(phase.views) > 1 and not phase.per_sample:  # the objective, and with it the pattern, may change
            self._attend(phase, start)
        set_rate(start, learning_rate(recipe, start.step))

    def end(self, result: StepResult) -> None:
        """After a step."""
        if self._progress:
            self._progress.step(result, self._phase)

    def _enter(self, phase: Phase, start: StepStart) -> None:
        """The first step of a phase, or of a process that goes on inside one."""
        section = self._request.recipe.phases[phase.ordinal]
        self._phase = phase
        self._forward_step.enter(range(phase.first_view, phase.first_view + len(phase.views)))
        self._freezer.freeze(section.frozen)
        # At the start of the phase, not at the end of the one before: a checkpoint of the edge still has the trunk's
        # optimizer, so that branches which keep it and branches which reset it share that checkpoint.
        if section.optimizer == "reset" and start.first_sample == phase.first:
            reset_optimizer(start.optimizer)
        if phase.per_sample:
            verify_per_sample(start.chunks, [view.pattern for view in phase.views])
        else:
            self._attend(phase, start)

    def _attend(self, phase: Phase, start: StepStart) -> None:
        pattern = phase.views[phase.view_number(start.first_sample)].pattern
        for chunk in start.chunks:
            self._forward_step.attend(chunk, pattern)
        verify(start.chunks, pattern)
