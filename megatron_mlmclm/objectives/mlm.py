"""Masked language modelling: chosen tokens are hidden and predicted where they stood."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives.base import Sample, Vocabulary
from megatron_mlmclm.objectives.keyed import draw_u64, threshold_u64


@dataclass(frozen=True)
class Mlm:
    """Each token is chosen with probability `ratio`, independently, and replaced by the mask token.

    That is the paper's corruption (its code: 100 % mask, no random or kept tokens). Special tokens are never chosen. Of
    a sequence that has any other token at least one is chosen.
    """

    vocabulary: Vocabulary
    ratio: float
    name: str = "mlm"
    direction: str = "bidirectional"

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise UserError(f"mask_ratio {self.ratio} is not in (0, 1]")
        if self.vocabulary.mask_id is None:
            raise UserError("the tokenizer has no mask token: give it one with `mlmclm tokenizer add-mask`")

    def make(self, tokens: np.ndarray, key: int) -> Sample:
        """See `Objective.make`. The stream's next token (the last of `tokens`) is not used."""
        labels = tokens[:-1]
        draws = draw_u64(key, len(labels))
        eligible = ~np.isin(labels, self.vocabulary.special_ids)
        chosen = eligible & (draws <= threshold_u64(self.ratio))
        if not chosen.any() and eligible.any():
            # The eligible token with the smallest draw: as if the ratio had been just large enough.
            chosen[np.where(eligible, draws, np.uint64(2**64 - 1)).argmin()] = True
        return Sample(inputs=np.where(chosen, self.vocabulary.mask_id, labels), labels=labels, predicted=chosen)

    def capacity(self, positions: int) -> int:
        """The expected count plus six standard deviations, to a multiple of 64: passed once in 1e9 micro-batches."""
        expected = positions * self.ratio
        bound = expected + 6.0 * math.sqrt(expected * (1.0 - self.ratio))
        return min(positions, math.ceil(bound / 64) * 64)
