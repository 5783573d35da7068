"""Causal language modelling: every position predicts the next token, or those after a prefix seen in full."""

from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives.base import Sample
from megatron_mlmclm.objectives.keyed import draw_share, hash_key


@dataclass(frozen=True)
class Clm:
    """All S positions are predicted; the label of the last one is the stream's next token.

    `prefix`: shares (low, high) of the sequence, 0 < low <= high < 1, else UserError. The first P tokens, P drawn
    evenly between them, may then see each other in both directions (prefix-LM, as in T5, arXiv 1910.10683, 3.2.1), and
    predicted is what comes after them: a label that the model can see is none. A prefix belongs to the whole sample:
    recipes refuse it where documents are told apart.
    """

    prefix: tuple[float, float] | None = None
    name: str = "clm"
    direction: str = "causal"

    def __post_init__(self) -> None:
        if self.prefix is not None and not 0.0 < self.prefix[0] <= self.prefix[1] < 1.0:
            raise UserError(f"prefix {list(self.prefix)}: give two shares [low, high] with 0 < low <= high < 1")

    def make(
        self,
        tokens: np.ndarray,
        key: int,
        step: int = 0,  # noqa: ARG002 - the same at every step
        documents: np.ndarray | None = None,
    ) -> Sample:
        """See `Objective.make`. A sequence of one token has no prefix."""
        positions = len(tokens) - 1
        prefix = self._length(positions, key) if self.prefix else 0
        predicted = np.arange(positions) >= prefix - 1
        if documents is not None:
            predicted &= (documents[1:] == documents[:-1]) & (documents[1:] >= 0)
        return Sample(inputs=tokens[:-1], labels=tokens[1:], predicted=predicted, prefix=prefix)

    def capacity(self, positions: int) -> int:
        """All positions; a prefix leaves some of them empty."""
        return positions

    def _length(self, positions: int, key: int) -> int:
        share = draw_share(hash_key("prefix", key), *self.prefix)
        return min(max(1, round(share * positions)), positions - 1)
