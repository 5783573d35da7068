"""When: which phase the n-th sample of a run belongs to, and through which view of that phase it is seen."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mlmclm.attention import Pattern
from megatron_mlmclm.objectives import Objective
from megatron_mlmclm.phases.choice import Choice, first


@dataclass(frozen=True)
class View:
    """How a sequence is trained on or measured: an objective under an attention pattern.

    `mask_seed` tells apart draws that should differ, and lets a replay repeat some. A phase's ordinal plays no part in
    them, so that a branch masks as the whole run would (DESIGN 4a.3).

    `per_sample`: the sequences of one micro-batch may differ in their pattern, which then travels with the batch.
    """

    name: str
    objective: Objective
    pattern: Pattern
    mask_seed: int = 0
    per_sample: bool = False


@dataclass(frozen=True)
class Phase:
    """Samples [first, first + samples) of the run are seen through one of `views`, which `choice` picks.

    `first_step` is the run's optimizer step (from 1) that takes sample `first`; a step takes `batch` samples.
    `first_view` numbers the phase's views among all those of the run.
    """

    ordinal: int
    name: str
    views: tuple[View, ...]
    first: int
    samples: int
    first_step: int = 1
    batch: int = 1
    first_view: int = 0
    choice: Choice = first

    @property
    def end(self) -> int:
        """One past the phase's last sample."""
        return self.first + self.samples

    @property
    def per_sample(self) -> bool:
        """See `View.per_sample`."""
        return self.views[0].per_sample

    def step(self, sample: int) -> int:
        """The step inside the phase, from 0, that takes the run's `sample`-th sample."""
        return (sample - self.first) // self.batch

    def view_number(self, sample: int) -> int:
        """Which of `views` the run's `sample`-th sample is seen through."""
        if len(self.views) == 1:
            return 0
        step = self.step(sample)
        return self.choice(sample, self.first + step * self.batch, step)


class Timeline:
    """The phases of a run end to end. A sample past the end still belongs to the last phase (prefetching asks)."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self._firsts = [phase.first for phase in self.phases]

    @property
    def end(self) -> int:
        """One past the run's last sample."""
        return self.phases[-1].end

    @property
    def views(self) -> tuple[View, ...]:
        """The views of all phases; `Phase.first_view` counts in it."""
        return tuple(view for phase in self.phases for view in phase.views)

    def at(self, sample: int) -> Phase:
        """The phase of the run's `sample`-th sample."""
        return self.phases[max(0, bisect.bisect_right(self._firsts, sample) - 1)]
