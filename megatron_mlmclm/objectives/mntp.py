"""Masked next-token prediction: a hidden token is predicted at the position before it."""

from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.objectives.base import Sample, of_inputs
from megatron_mlmclm.objectives.corruption import Corruption
from megatron_mlmclm.objectives.mlm import masked_capacity
from megatron_mlmclm.objectives.ratio import Ratio, as_ratio


@dataclass(frozen=True)
class Mntp:
    """MLM with a decoder's alignment: the label of a hidden token stands one position earlier.

    LLM2Vec's (arXiv 2404.05961) and Ettin's way out of a decoder, whose head has learned to name the next token. The
    first token of a document has no position before it and is never chosen. `ratio`: as for `Mlm`.
    """

    corruption: Corruption
    ratio: float | Ratio
    name: str = "mntp"
    direction: str = "bidirectional"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", as_ratio(self.ratio))

    def make(self, tokens: np.ndarray, key: int, step: int = 0, documents: np.ndarray | None = None) -> Sample:
        """See `Objective.make`. The stream's next token (the last of `tokens`) is a label nowhere: it is not hidden."""
        read = tokens[:-1]
        chosen = self.corruption.choose(read, key, self.ratio.at(step), of_inputs(documents), spare_first=True)
        predicted = np.append(chosen[1:], False)
        return Sample(inputs=self.corruption.replace(read, chosen, key), labels=tokens[1:], predicted=predicted)

    def capacity(self, positions: int) -> int:
        """See `masked_capacity`."""
        return masked_capacity(positions, self.ratio.largest)
