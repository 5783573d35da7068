"""Which tokens make up a word, as far as ids can tell."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class WordMarks:
    """Whether a token begins a word, by a table over how the token before it ends and how it begins itself.

    Attributes:
        tails: how each id ends, an index into the rows of `splits`, int [vocabulary].
        heads: how each id begins, an index into the columns of `splits`, int [vocabulary].
        splits: whether a word ends between such a tail and such a head, bool [tails, heads].
    """

    tails: np.ndarray
    heads: np.ndarray
    splits: np.ndarray

    @classmethod
    def of(cls, tails: np.ndarray, heads: np.ndarray, splits: np.ndarray, alone: np.ndarray) -> "WordMarks":
        """Marks where, beside what `splits` says, the ids `alone` (bool [vocabulary]) share no word with a neighbour.

        Shapes are those of the attributes.
        """
        rows, columns = splits.shape
        apart = np.ones((rows + 1, columns + 1), dtype=bool)
        apart[:rows, :columns] = splits
        return cls(np.where(alone, rows, tails), np.where(alone, columns, heads), apart)

    def begins(self, tokens: np.ndarray) -> np.ndarray:
        """Whether each of `tokens` (int64 [S]) begins a word, bool [S]; the first one always does."""
        begins = np.ones(len(tokens), dtype=bool)
        begins[1:] = self.splits[self.tails[tokens[:-1]], self.heads[tokens[1:]]]
        return begins
