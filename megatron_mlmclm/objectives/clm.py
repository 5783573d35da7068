"""Causal language modelling: every position predicts the next token."""

from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.objectives.base import Sample


@dataclass(frozen=True)
class Clm:
    """All S positions are predicted; the label of the last one is the stream's next token."""

    name: str = "clm"
    direction: str = "causal"

    def make(self, tokens: np.ndarray, key: int) -> Sample:  # noqa: ARG002 - nothing is random here
        """See `Objective.make`."""
        return Sample(inputs=tokens[:-1], labels=tokens[1:], predicted=np.ones(len(tokens) - 1, dtype=bool))

    def capacity(self, positions: int) -> int:
        """Exactly all positions."""
        return positions
