"""Which tokens of a sequence are hidden, and what the model reads in their place."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives.base import Vocabulary
from megatron_mlmclm.objectives.keyed import draw_u64, threshold_u64
from megatron_mlmclm.objectives.spans import choose_spans, length_thresholds

Selection = Literal["bernoulli", "exact", "words", "spans"]
ALL = np.uint64(2**64 - 1)
LOWER_HALF = np.uint64(2**32 - 1)


@dataclass(frozen=True)
class Corruption:
    """Choose tokens at a ratio; of the chosen, replace the shares `mask` and `random`, and leave `keep` as they are.

    `selection`:
        "bernoulli": each token independently (the paper).
        "exact": the same count in every sequence, which is the ratio of its ordinary tokens, rounded.
        "words": whole words, each independently (BERT's whole-word masking); needs `vocabulary.words`.
        "spans": the count of "exact", in spans of geometric length (SpanBERT, arXiv 1907.10529) that are at most
            `span_max` and on average `span_mean` tokens long before neighbours cut them short.

    Special tokens are never chosen and never drawn as replacements; of a sequence that has any other token at least one
    token (word) is chosen. A larger ratio chooses the same tokens and more. Defaults are the paper's code; BERT's
    shares are 0.8, 0.1, 0.1.

    Raises:
        UserError: shares that are negative or do not sum to 1, an unknown selection, no mask token or no words to use,
            spans that are on average longer than the longest or shorter than a token.
    """

    vocabulary: Vocabulary
    mask: float = 1.0
    random: float = 0.0
    keep: float = 0.0
    selection: Selection = "bernoulli"
    span_mean: float = 3.0
    span_max: int = 10

    def __post_init__(self) -> None:
        shares = (self.mask, self.random, self.keep)
        if min(shares) < 0.0 or abs(sum(shares) - 1.0) > 1e-9:
            raise UserError(f"corruption shares mask {self.mask}, random {self.random}, keep {self.keep} must sum to 1")
        if self.selection not in get_args(Selection):
            raise UserError(f"selection {self.selection!r} is not one of {', '.join(get_args(Selection))}")
        if not 1.0 <= self.span_mean <= self.span_max:
            raise UserError(f"span_mean {self.span_mean} is not between 1 and span_max {self.span_max}")
        self.vocabulary.need_mask()
        if self.selection == "words" and self.vocabulary.words is None:
            raise UserError(
                "selection words needs a tokenizer whose words can be told: one with ##, ▁ or Ġ pieces, such as"
                " `mlmclm tokenizer train` makes; or choose selection: exact or spans"
            )

    @cached_property
    def is_text(self) -> np.ndarray:
        """Whether each id stands for text, bool [vocabulary]."""
        return ~np.isin(np.arange(self.vocabulary.size), self.vocabulary.special_ids)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Ids that stand for text, int64 [vocabulary less specials]."""
        return np.flatnonzero(self.is_text)

    @cached_property
    def span_lengths(self) -> np.ndarray:
        """See `length_thresholds`, uint64 [span_max - 1]."""
        return length_thresholds(self.span_mean, self.span_max)

    def choose(
        self,
        tokens: np.ndarray,
        key: int,
        ratio: float,
        documents: np.ndarray | None = None,
        *,
        spare_first: bool = False,
    ) -> np.ndarray:
        """Which of `tokens` (int64 [S]) are chosen at `ratio` in (0, 1], bool [S].

        `documents`: the number of each token's document, int64 [S], -1 on padding, which is never chosen; None: they
        are all of one. `spare_first`: never the first token of a document; nor, of whole words, any other of its first
        word.
        """
        draws = draw_u64(key, len(tokens))
        eligible = self.is_text[tokens]
        if documents is not None:
            eligible &= documents >= 0
        if self.selection == "words":
            edges = _document_begins(len(tokens), documents)
            return self._words(tokens, eligible, draws, ratio, edges, spare_first)
        if spare_first:
            eligible &= ~_document_begins(len(tokens), documents)
        if self.selection == "bernoulli":
            return _below(eligible, draws, ratio)
        count = max(1, round(ratio * int(eligible.sum())))
        if self.selection == "exact":
            return _smallest(eligible, draws, count)
        return choose_spans(eligible, draws, key, count, self.span_lengths)

    def replace(self, tokens: np.ndarray, chosen: np.ndarray, key: int) -> np.ndarray:
        """What the model reads, int64 [S]: `tokens` with the `chosen` ones hidden.

        A token's kind and its replacement are a later word of the stream that `choose` began: other shares hide the
        same tokens. The word's size tells the kind; its lower half, on which that does not depend, the replacement.
        """
        if self.mask == 1.0:
            return np.where(chosen, self.vocabulary.mask_id, tokens)
        draws, inputs = draw_u64(key, len(tokens), start=len(tokens)), tokens.copy()
        masked = chosen & (draws <= threshold_u64(self.mask)) if self.mask > 0.0 else np.zeros_like(chosen)
        inputs[masked] = self.vocabulary.mask_id
        # From here on few are left: by their places, which costs less than going over all.
        (drawn,) = ((draws <= threshold_u64(self.mask + self.random)) & (chosen ^ masked)).nonzero()
        inputs[drawn] = self.ordinary[(draws[drawn] & LOWER_HALF) % np.uint64(len(self.ordinary))]
        return inputs

    def _words(
        self,
        tokens: np.ndarray,
        eligible: np.ndarray,
        draws: np.ndarray,
        ratio: float,
        edges: np.ndarray,
        spare_first: bool,
    ) -> np.ndarray:
        """The draw of a word is that of its first token; a special token is a word of its own, and not eligible.

        `edges`: where a document begins, bool [S]; a word begins there too.
        """
        begins = self.vocabulary.words.begins(tokens) | edges
        firsts = np.flatnonzero(begins)
        candidates = eligible[firsts]
        if spare_first:
            candidates &= ~edges[firsts]
        chosen = _below(candidates, draws[firsts], ratio)
        return chosen[np.cumsum(begins) - 1] & eligible


def _document_begins(count: int, documents: np.ndarray | None) -> np.ndarray:
    """Which of `count` tokens begin a document, bool [count]; the first one always does."""
    begins = np.zeros(count, dtype=bool)
    begins[:1] = True
    if documents is not None:
        begins[1:] = documents[1:] != documents[:-1]
    return begins


def _below(eligible: np.ndarray, draws: np.ndarray, ratio: float) -> np.ndarray:
    """Each eligible one with probability `ratio`, and at least one: as if the ratio had been just large enough."""
    chosen = eligible & (draws <= threshold_u64(ratio))
    return chosen if chosen.any() else _smallest(eligible, draws, 1)


def _smallest(eligible: np.ndarray, draws: np.ndarray, count: int) -> np.ndarray:
    """The `count` eligible ones with the smallest draws (all, where there are fewer)."""
    order = np.argsort(np.where(eligible, draws, ALL), kind="stable")[:count]
    chosen = np.zeros_like(eligible)
    chosen[order] = True
    return chosen & eligible
