"""When: which phase the n-th sample of a run belongs to."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mlmclm.attention import Pattern
from megatron_mlmclm.objectives import Objective


@dataclass(frozen=True)
class View:
    """How a sequence is trained on or measured: an objective under an attention pattern.

    `mask_seed` tells apart draws that should differ, and lets a replay repeat some. A phase's ordinal plays no part in
    them, so that a branch masks as the whole run would (DESIGN 4a.3).
    """

    objective: Objective
    pattern: Pattern
    mask_seed: int = 0


@dataclass(frozen=True)
class Phase:
    """Samples [first, first + samples) of the run are seen through `view`."""

    ordinal: int
    name: str
    view: View
    first: int
    samples: int

    @property
    def end(self) -> int:
        """One past the phase's last sample."""
        return self.first + self.samples


class Timeline:
    """The phases of a run end to end. A sample past the end still belongs to the last phase (prefetching asks)."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self._firsts = [phase.first for phase in self.phases]

    @classmethod
    def of(cls, parts: Sequence[tuple[str, View, int]]) -> "Timeline":
        """Lay (name, view, samples) parts end to end, from sample 0."""
        phases: list[Phase] = []
        first = 0
        for ordinal, (name, view, samples) in enumerate(parts):
            phases.append(Phase(ordinal, name, view, first, samples))
            first += samples
        return cls(phases)

    @property
    def samples(self) -> int:
        """Samples in the whole run."""
        return self.phases[-1].end

    def at(self, sample: int) -> Phase:
        """The phase of the run's `sample`-th sample."""
        return self.phases[bisect.bisect_right(self._firsts, sample) - 1]
