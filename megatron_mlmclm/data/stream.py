"""An indexed data set cut into samples of one length (DESIGN 4a.1): no index is built, none is cached."""

from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_mlmclm.data.indexed import IndexedReader
from megatron_mlmclm.errors import UserError


class Stream(Protocol):
    """Indexed data as samples of one length, by whatever packing: what order, blend and dataset need of it."""

    reader: IndexedReader
    seq_length: int  # S
    n_samples: int

    def sample(self, index: int) -> np.ndarray:
        """Tokens of sample `index` (0 .. n_samples - 1): S inputs and the label after them, int64 [S + 1]."""
        ...

    def documents(self, index: int) -> np.ndarray | None:
        """The document of each of those tokens, from 0 in the sample, int64 [S + 1], -1 on padding; None: one."""
        ...

    @property
    def padding(self) -> float:
        """The share of input positions that hold no token."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that tells this data from other data; sequence length and packing play no part."""
        ...


class TokenStream:
    """Sample i is tokens [i * S, i * S + S], both ends included: S inputs, and one more as the last label.

    Neighbours share one token, which is a label in one and an input in the other. Attributes: `reader`, `seq_length`
    (S, tokens), `n_samples`. Errors: UserError when the data is shorter than one sample.
    """

    def __init__(self, prefix: str | Path, seq_length: int) -> None:
        self.reader = IndexedReader(prefix)
        self.seq_length = seq_length
        if seq_length < 1:
            raise UserError(f"sequence length {seq_length}: must be 1 or more")
        self.n_samples = (self.reader.n_tokens - 1) // seq_length
        if self.n_samples < 1:
            raise UserError(
                f"{self.reader.prefix}: holds {self.reader.n_tokens:,} tokens, one sample of sequence length"
                f" {seq_length:,} needs {seq_length + 1:,}; shorten the sequence or add data"
            )

    def __len__(self) -> int:
        return self.n_samples

    def sample(self, index: int) -> np.ndarray:
        """Tokens of sample `index` (0 .. n_samples - 1), a copy, int64 [S + 1]. IndexError outside."""
        start = self._start(index)
        return self.reader.tokens(start, start + self.seq_length + 1)

    def document_starts(self, index: int) -> np.ndarray:
        """Places in sample `index`, 1 .. S, at which a new document begins, rising, int64 [any]."""
        start = self._start(index)
        return self.reader.document_ends(start, start + self.seq_length + 1) - start

    def documents(self, index: int) -> np.ndarray | None:  # noqa: ARG002 - see `Stream`
        """None: here nobody asks which document a token belongs to."""
        return None

    @property
    def padding(self) -> float:
        """0: samples are full."""
        return 0.0

    @property
    def fingerprint(self) -> str:
        """A hash that tells this data from other data; the sequence length plays no part."""
        return self.reader.fingerprint

    def _start(self, index: int) -> int:
        if not 0 <= index < self.n_samples:
            raise IndexError(f"sample {index} of {self.n_samples} in {self.reader.prefix}")
        return index * self.seq_length


class DocumentStream(TokenStream):
    """The samples of `TokenStream`, which also say where their documents lie: their parts, where a cut went through."""

    def documents(self, index: int) -> np.ndarray:
        """The number of each token's document, from 0 in sample `index`, rising, int64 [S + 1]."""
        begins = np.zeros(self.seq_length + 1, np.int64)
        begins[self.document_starts(index)] = 1
        return np.cumsum(begins)
