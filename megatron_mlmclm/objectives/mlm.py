"""Masked language modelling: chosen tokens are hidden and predicted where they stood."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.objectives.base import Sample, of_inputs
from megatron_mlmclm.objectives.corruption import Corruption
from megatron_mlmclm.objectives.ratio import Ratio, as_ratio


@dataclass(frozen=True)
class Mlm:
    """Predicts each token that `corruption` chose, at its own position, with the whole sequence in sight.

    `ratio`: how many are chosen at each step of the phase; a plain number holds at all of them.
    """

    corruption: Corruption
    ratio: float | Ratio
    name: str = "mlm"
    direction: str = "bidirectional"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", as_ratio(self.ratio))

    def make(self, tokens: np.ndarray, key: int, step: int = 0, documents: np.ndarray | None = None) -> Sample:
        """See `Objective.make`. The stream's next token (the last of `tokens`) is not used."""
        labels = tokens[:-1]
        chosen = self.corruption.choose(labels, key, self.ratio.at(step), of_inputs(documents))
        return Sample(inputs=self.corruption.replace(labels, chosen, key), labels=labels, predicted=chosen)

    def capacity(self, positions: int) -> int:
        """See `masked_capacity`."""
        return masked_capacity(positions, self.ratio.largest)


def masked_capacity(positions: int, ratio: float) -> int:
    """The expected count plus six standard deviations, to a multiple of 64: passed once in 1e9 micro-batches.

    The deviation is that of tokens chosen one by one. Exact counts and spans stay below it; whole words, which come in
    clumps, pass it more often.
    """
    expected = positions * ratio
    bound = expected + 6.0 * math.sqrt(expected * (1.0 - ratio))
    return min(positions, math.ceil(bound / 64) * 64)
