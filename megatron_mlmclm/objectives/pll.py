"""Pseudo-likelihood: each token of a sequence predicted from all the others, one at a time."""

from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.objectives.base import Sample, Vocabulary


@dataclass(frozen=True)
class PseudoLikelihood:
    """Step i hides and predicts the token at position i alone (Salazar et al. 2020, arXiv 1910.14659).

    Over the steps 0 .. S - 1 the losses sum to the negative pseudo-log-likelihood. UserError: no mask token.
    """

    vocabulary: Vocabulary
    name: str = "pll"
    direction: str = "bidirectional"

    def __post_init__(self) -> None:
        self.vocabulary.need_mask()

    def make(
        self,
        tokens: np.ndarray,
        key: int,  # noqa: ARG002 - nothing is random here
        step: int = 0,
        documents: np.ndarray | None = None,
    ) -> Sample:
        """See `Objective.make`. Special tokens and padding are left alone. IndexError past the sequence."""
        labels = tokens[:-1]
        predicted = np.zeros(len(labels), dtype=bool)
        is_text = documents is None or documents[step] >= 0
        predicted[step] = is_text and labels[step] not in self.vocabulary.special_ids
        return Sample(np.where(predicted, self.vocabulary.mask_id, labels), labels, predicted)

    def capacity(self, positions: int) -> int:
        """One row a sequence: 64 do for most micro-batches."""
        return min(positions, 64)
