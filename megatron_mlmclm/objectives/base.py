"""The protocol of an objective: tokens in, (inputs, labels, predicted positions) out."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives.words import WordMarks


@dataclass(frozen=True)
class Vocabulary:
    """What an objective must know of a tokenizer: ids are below `size`; `special_ids` are never predicted or drawn.

    `words`: which tokens make up a word, None where nobody asked or the tokenizer cannot tell.
    """

    size: int
    mask_id: int | None = None
    special_ids: tuple[int, ...] = ()
    words: WordMarks | None = None

    def need_mask(self) -> int:
        """The mask token's id. UserError if there is none."""
        if self.mask_id is None:
            raise UserError("the tokenizer has no mask token: give it one with `mlmclm tokenizer add-mask`")
        return self.mask_id


@dataclass(frozen=True)
class Sample:
    """One training sequence of S positions.

    Attributes:
        inputs: what the model reads, int64 [S].
        labels: the token to predict at each position, int64 [S]; meaningless where not predicted.
        predicted: where the loss is taken, bool [S].
        weight: the factor of this sequence's losses.
        prefix: how many first tokens may see each other in both directions; 0: this is no prefix-LM sample.
    """

    inputs: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    weight: float = 1.0
    prefix: int = 0


def of_inputs(documents: np.ndarray | None) -> np.ndarray | None:
    """Of the documents of S + 1 tokens those of the S that are read."""
    return None if documents is None else documents[:-1]


class Objective(Protocol):
    """One way to train on a sequence. Stateless: the sample is a function of (tokens, key, step) alone."""

    name: str
    direction: str  # who may see whom unless the phase says otherwise: "causal" or "bidirectional"

    def make(self, tokens: np.ndarray, key: int, step: int = 0, documents: np.ndarray | None = None) -> Sample:
        """Make a sample from S + 1 tokens (int64) of the stream.

        `key` (128 bits) names its random stream; `step` counts from 0 inside the phase, for what changes on the way.
        `documents` numbers the document of each token, int64 [S + 1], -1 on padding; None: they are all of one. Padding
        is neither hidden nor predicted, and no token is predicted from another document's.
        """
        ...

    def capacity(self, positions: int) -> int:
        """Rows the head is padded to for a micro-batch of `positions` = micro_batch_size * S (more go in chunks)."""
        ...
