"""How many tokens are hidden, step by step: a masking ratio is a function of the step inside its phase."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np

from megatron_mlmclm.errors import UserError

Curve = Literal["linear", "cosine"]


class Ratio(Protocol):
    """A masking ratio in (0, 1] for every step (0-based, inside the phase)."""

    @property
    def largest(self) -> float:
        """No step has a larger one."""
        ...

    def at(self, step: int) -> float:
        """The ratio of step `step`."""
        ...

    def mean(self, steps: int) -> float:
        """The mean over the steps 0 .. `steps` - 1; `steps` is at least 1."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same ratio at every step. UserError outside (0, 1]."""

    value: float

    def __post_init__(self) -> None:
        _check(self.value)

    @property
    def largest(self) -> float:
        """See `Ratio`."""
        return self.value

    def at(self, step: int) -> float:  # noqa: ARG002 - it does not change
        """See `Ratio`."""
        return self.value

    def mean(self, steps: int) -> float:  # noqa: ARG002
        """See `Ratio`."""
        return self.value


@dataclass(frozen=True)
class Ramp:
    """From `start` at step 0 to `end` at step `steps` - 1, where it stays; one step is `end` at once.

    `curve`: "linear", or "cosine" (half a wave: flat at both ends). Large ratios first and small ones later is what
    dynamic masking schedules do (arXiv 2305.15096). UserError: a ratio outside (0, 1], no step, an unknown curve.
    """

    start: float
    end: float
    steps: int
    curve: Curve = "linear"

    def __post_init__(self) -> None:
        _check(self.start)
        _check(self.end)
        if self.steps < 1:
            raise UserError(f"mask_ratio steps {self.steps}: a schedule has at least 1")
        if self.curve not in get_args(Curve):
            raise UserError(f"mask_ratio kind {self.curve!r} is not one of {', '.join(get_args(Curve))}")

    @property
    def largest(self) -> float:
        """See `Ratio`."""
        return max(self.start, self.end)

    def at(self, step: int) -> float:
        """See `Ratio`."""
        return float(self._at(np.array([step]))[0])

    def mean(self, steps: int) -> float:
        """See `Ratio`. The sum of what `at` gives, not an integral."""
        ramp = self._at(np.arange(min(steps, self.steps)))
        return (float(ramp.sum()) + self.end * max(0, steps - self.steps)) / steps

    def _at(self, steps: np.ndarray) -> np.ndarray:
        """The ratios of `steps` (integers [N]), float64 [N]."""
        last = self.steps - 1
        done = np.minimum(steps, last) / last if last else np.ones(len(steps))
        if self.curve == "cosine":
            done = (1.0 - np.cos(np.pi * done)) / 2.0
        # Weighted from both sides, both ends come out exactly; between them rounding must not pass either.
        ratios = (1.0 - done) * self.start + done * self.end
        return np.clip(ratios, min(self.start, self.end), self.largest)


@dataclass(frozen=True)
class Steps:
    """A table {first step: ratio}: each ratio holds from its step on. UserError: a ratio outside (0, 1], no step 0."""

    table: Mapping[int, float] = field(hash=False)

    def __post_init__(self) -> None:
        for ratio in self.table.values():
            _check(ratio)
        if not self.table or min(self.table) != 0:
            raise UserError(f"mask_ratio steps {sorted(self.table)} must begin with step 0")

    @property
    def largest(self) -> float:
        """See `Ratio`. Entries that a short phase never reaches count."""
        return max(self.table.values())

    def at(self, step: int) -> float:
        """See `Ratio`."""
        return self.table[max(first for first in self.table if first <= step)]

    def mean(self, steps: int) -> float:
        """See `Ratio`."""
        firsts = sorted(first for first in self.table if first < steps)
        ends = [*firsts[1:], steps]
        return sum(self.table[first] * (end - first) for first, end in zip(firsts, ends, strict=True)) / steps


def as_ratio(ratio: float | Ratio) -> Ratio:
    """A plain number as a constant; a ratio as it is."""
    return Constant(float(ratio)) if isinstance(ratio, int | float) else ratio


def _check(ratio: float) -> None:
    if not 0.0 < ratio <= 1.0:
        raise UserError(f"mask_ratio {ratio} is not in (0, 1]")
