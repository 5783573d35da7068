"""Masked language modelling: chosen tokens are hidden and predicted where they stood."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.objectives.base import Sample
from megatron_mlmclm.objectives.corruption import Corruption


@dataclass(frozen=True)
class Mlm:
    """Predicts each token that `corruption` chose, at its own position, with the whole sequence in sight."""

    corruption: Corruption
    name: str = "mlm"
    direction: str = "bidirectional"

    def make(self, tokens: np.ndarray, key: int) -> Sample:
        """See `Objective.make`. The stream's next token (the last of `tokens`) is not used."""
        labels = tokens[:-1]
        chosen = self.corruption.choose(labels, key)
        return Sample(inputs=self.corruption.replace(labels, chosen, key), labels=labels, predicted=chosen)

    def capacity(self, positions: int) -> int:
        """See `masked_capacity`."""
        return masked_capacity(positions, self.corruption.ratio)


def masked_capacity(positions: int, ratio: float) -> int:
    """The expected count plus six standard deviations, to a multiple of 64: passed once in 1e9 micro-batches."""
    expected = positions * ratio
    bound = expected + 6.0 * math.sqrt(expected * (1.0 - ratio))
    return min(positions, math.ceil(bound / 64) * 64)
