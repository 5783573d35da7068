"""Whole documents packed into samples, and the choice between packings."""

from pathlib import Path

import numpy as np

from megatron_mlmclm.data.indexed import IndexedReader
from megatron_mlmclm.data.plan_file import PackPlan
from megatron_mlmclm.data.stream import DocumentStream, Stream, TokenStream


def open_stream(prefix: str | Path, seq_length: int, packing: str, fill_id: int) -> Stream:
    """The samples of `prefix` by `packing`: "cut", "documents" or "packed"; padding is `fill_id`. Errors: UserError."""
    if packing == "packed":
        return PackedStream(prefix, seq_length, fill_id)
    return DocumentStream(prefix, seq_length) if packing == "documents" else TokenStream(prefix, seq_length)


class PackedStream:
    """Samples by a plan (`mlmclm pack`): whole documents, those longer than S in pieces of S, and padding behind them.

    A sample that is a piece of a longer document has the document's next token as its last label; else that is padding.
    Over an epoch each token is an input once. Attributes and errors: see `TokenStream` and `PackPlan`.
    """

    def __init__(self, prefix: str | Path, seq_length: int, fill_id: int) -> None:
        self.reader = IndexedReader(prefix)
        self.seq_length = seq_length
        self._fill_id = fill_id
        self._plan = PackPlan(self.reader, seq_length)
        self.n_samples = self._plan.n_samples

    def __len__(self) -> int:
        return self.n_samples

    def sample(self, index: int) -> np.ndarray:
        """Tokens of sample `index` (0 .. n_samples - 1), int64 [S + 1]. IndexError outside."""
        tokens = np.full(self.seq_length + 1, self._fill_id, np.int64)
        at = 0
        for start, length in self._pieces(index):
            tokens[at : at + length] = self.reader.tokens(start, start + length)
            at += length
        return tokens

    def documents(self, index: int) -> np.ndarray:
        """The document of each of those tokens, from 0 in the sample, -1 on padding, int64 [S + 1]."""
        lengths = [length for _, length in self._pieces(index)]
        documents = np.full(self.seq_length + 1, -1, np.int64)
        documents[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        return documents

    @property
    def padding(self) -> float:
        """The share of input positions that hold no token."""
        return self._plan.padding

    @property
    def fingerprint(self) -> str:
        """A hash that tells this data from other data; the sequence length plays no part."""
        return self.reader.fingerprint

    def _pieces(self, index: int) -> list[list[int]]:
        """[start, length] of each piece; a full one goes one token further where its document does."""
        pieces = self._plan.pieces(index)
        start, length = pieces[0]
        if length == self.seq_length and self._goes_on(start + length):
            return [[start, length + 1]]
        return pieces

    def _goes_on(self, place: int) -> bool:
        """Whether the token at `place` is of the same document as the one before it."""
        return place < self.reader.n_tokens and not self.reader.document_ends(place - 1, place + 1).size

    def __reduce__(self) -> tuple[type["PackedStream"], tuple[str, int, int]]:
        return PackedStream, (self.reader.prefix, self.seq_length, self._fill_id)
