"""Which tokens of a sequence are hidden, and what the model reads in their place."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives.base import Vocabulary
from megatron_mlmclm.objectives.keyed import draw_u64, threshold_u64

Selection = Literal["bernoulli", "exact"]
ALL = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class Corruption:
    """Choose tokens at `ratio`; of the chosen, replace the shares `mask` and `random`, and leave `keep` as they are.

    `selection`: "bernoulli", each token independently (the paper); "exact", the same count in every sequence, which
    is the ratio of its ordinary tokens, rounded. Special tokens are never chosen and never drawn as replacements; of a
    sequence that has any other token at least one is chosen. Defaults are the paper's code; BERT's are 0.8, 0.1, 0.1.

    Raises:
        UserError: a ratio outside (0, 1], shares that are negative or do not sum to 1, no mask token to use.
    """

    vocabulary: Vocabulary
    ratio: float
    mask: float = 1.0
    random: float = 0.0
    keep: float = 0.0
    selection: Selection = "bernoulli"

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise UserError(f"mask_ratio {self.ratio} is not in (0, 1]")
        shares = (self.mask, self.random, self.keep)
        if min(shares) < 0.0 or abs(sum(shares) - 1.0) > 1e-9:
            raise UserError(f"corruption shares mask {self.mask}, random {self.random}, keep {self.keep} must sum to 1")
        if self.selection not in get_args(Selection):
            raise UserError(f"selection {self.selection!r} is not one of {', '.join(get_args(Selection))}")
        if self.vocabulary.mask_id is None:
            raise UserError("the tokenizer has no mask token: give it one with `mlmclm tokenizer add-mask`")

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Ids that stand for text, int64 [vocabulary less specials]."""
        return np.setdiff1d(np.arange(self.vocabulary.size), self.vocabulary.special_ids)

    def choose(self, tokens: np.ndarray, key: int, *, spare_first: bool = False) -> np.ndarray:
        """Which of `tokens` (int64 [S]) are chosen, bool [S]. `spare_first`: never the first."""
        draws = draw_u64(key, len(tokens))
        eligible = ~np.isin(tokens, self.vocabulary.special_ids)
        if spare_first:
            eligible[:1] = False
        if self.selection == "exact":
            return self._exactly(eligible, draws)
        chosen = eligible & (draws <= threshold_u64(self.ratio))
        # Else the eligible token with the smallest draw: as if the ratio had been just large enough.
        return chosen if chosen.any() else self._smallest(eligible, draws, 1)

    def replace(self, tokens: np.ndarray, chosen: np.ndarray, key: int) -> np.ndarray:
        """What the model reads, int64 [S]: `tokens` with the `chosen` ones hidden.

        The kinds and replacements are later words of the stream that `choose` began: other shares hide the same tokens.
        """
        if self.mask == 1.0:
            return np.where(chosen, self.vocabulary.mask_id, tokens)
        kinds, words = draw_u64(key, 3 * len(tokens)).reshape(3, -1)[1:]
        masked = chosen & (kinds <= threshold_u64(self.mask)) & (self.mask > 0.0)
        kept = chosen & ~masked & (kinds > threshold_u64(self.mask + self.random))
        drawn = self.ordinary[words % np.uint64(len(self.ordinary))]
        inputs = np.where(chosen & ~masked & ~kept, drawn, tokens)
        return np.where(masked, self.vocabulary.mask_id, inputs)

    def _exactly(self, eligible: np.ndarray, draws: np.ndarray) -> np.ndarray:
        return self._smallest(eligible, draws, max(1, round(self.ratio * int(eligible.sum()))))

    @staticmethod
    def _smallest(eligible: np.ndarray, draws: np.ndarray, count: int) -> np.ndarray:
        """The `count` eligible tokens with the smallest draws (all, where there are fewer)."""
        order = np.argsort(np.where(eligible, draws, ALL), kind="stable")[:count]
        chosen = np.zeros_like(eligible)
        chosen[order] = True
        return chosen & eligible
