"""The protocol of an objective: tokens in, (inputs, labels, predicted positions) out."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Vocabulary:
    """What an objective must know of a tokenizer: ids are below `size`; `special_ids` are never predicted or drawn."""

    size: int
    mask_id: int | None = None
    special_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One training sequence of S positions.

    Attributes:
        inputs: what the model reads, int64 [S].
        labels: the token to predict at each position, int64 [S]; meaningless where not predicted.
        predicted: where the loss is taken, bool [S].
    """

    inputs: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray


class Objective(Protocol):
    """One way to train on a sequence. Stateless: the sample is a function of (tokens, key) alone."""

    name: str
    direction: str  # who may see whom unless the phase says otherwise: "causal" or "bidirectional"

    def make(self, tokens: np.ndarray, key: int) -> Sample:
        """Make a sample from S + 1 tokens (int64) of the stream; `key` (128 bits) names its random stream."""
        ...

    def capacity(self, positions: int) -> int:
        """Rows the head is padded to for a micro-batch of `positions` = micro_batch_size * S (more go in chunks)."""
        ...
