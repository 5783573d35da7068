"""Text -> ids, by `gigatoken` where it agrees with the tokenizer on the user's own text, else by `tokenizers`.

gigatoken is ten times as fast and reads the same tokenizer.json, but not every kind of one, and it is young: its ids
are taken only after they were compared (`choose`), and each batch of a run compares one document again.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from megatron_mlmclm.data.indexed import best_dtype
from megatron_mlmclm.data.tokenizer import Tokenizer
from megatron_mlmclm.errors import UserError

Library = Literal["gigatoken", "tokenizers"]
SAMPLE = 256  # documents compared beforehand, at most,
SAMPLE_LETTERS = 400_000  # and how much text at most: a quarter of a second
COMPARED_LETTERS = 20_000  # a document of a run that is longer is not compared: `tokenizers` would take the time
# What text seldom holds and tokenizers differ in: white space, digits, joined and composed letters, scripts, controls.
PROBES = (
    *("", " ", "  two  spaces ", "\n\n\n", "\r\n line\r\n", "\t\ttabs", "a\u00a0b\u2003c\u3000d", "\u200b\ufeffx"),
    *(
        "1234567890 3.14159 1,000,000 x2y",
        "don't we'll I'D THEY'RE",
        "naïve nai\u0308ve ﬁ ½ Å \u212b",
        "東京は日本です。",
    ),
    *(
        "Привет, мир",
        "مرحبا بالعالم",
        "नमस्ते",
        "สวัสดี",
        "🎉👩\u200d👩\u200d👧🇫🇷",
        "\x00\x01\x7f",
        "<s></s><unk><|endoftext|>",
    ),
    *("foo_bar.baz(qux)->x != {y: [1]};", "https://example.org/a?b=c&d=%20#e", "a" * 300, "!?" * 100, "'s 'S ’s"),
)


class Encoded(NamedTuple):
    """Documents as ids: ids [sum of lengths] in the output's dtype, lengths int32 [documents], EOS counted."""

    ids: np.ndarray
    lengths: np.ndarray
    empty: int  # documents that came to no token, left out


class Encoder:
    """Documents -> ids, each document ended by EOS."""

    def __init__(self, tokenizer: Tokenizer, library: Library) -> None:
        # One worker is one process is one thread: the tokenizer's own threads would fight over the CPUs.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.tokenizer = tokenizer
        self.dtype = best_dtype(tokenizer.vocab_size)
        self.fast = load_gigatoken(tokenizer) if library == "gigatoken" else None
        self._end = np.array([tokenizer.eos_id], np.uint32)

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """Errors: UserError for an id outside the vocabulary, or where gigatoken departs from the tokenizer."""
        filled = [ids for ids in self.encode(texts) if len(ids)]
        if not filled:
            return Encoded(np.empty(0, self.dtype), np.empty(0, np.int32), len(texts))
        lengths = np.fromiter(map(len, filled), np.int32, len(filled)) + 1
        flat = np.concatenate([part for ids in filled for part in (ids, self._end)], dtype=np.int64, casting="unsafe")
        self._check(flat)
        return Encoded(flat.astype(self.dtype), lengths, len(texts) - len(filled))

    def encode(self, texts: Sequence[str]) -> list:
        """Ids of each text, without EOS."""
        if self.fast is None:
            return self.tokenizer.encode_batch(list(texts))
        found = [self.fast.encode(text) for text in texts]
        at = next((n for n, text in enumerate(texts) if len(text) <= COMPARED_LETTERS), None)
        if at is not None and self.tokenizer.encode_batch([texts[at]])[0] != found[at].tolist():
            raise UserError(
                f"{self.tokenizer.folder}: gigatoken has other ids than the tokenizer for {texts[at][:60]!r}; run again"
                " with --tokenize-with tokenizers"
            )
        return found

    def _check(self, ids: np.ndarray) -> None:
        if ids.max() >= self.tokenizer.vocab_size or ids.min() < 0:
            raise UserError(
                f"{self.tokenizer.folder}: gives the id {ids.max():,}, outside its vocabulary of"
                f" {self.tokenizer.vocab_size:,}; its files do not belong together"
            )


def load_gigatoken(tokenizer: Tokenizer):  # noqa: ANN201 (the library's type; it is imported here alone)
    """gigatoken's reading of the same tokenizer.json. ImportError, or the library's own errors, where it cannot."""
    import gigatoken

    return gigatoken.Tokenizer.from_json(tokenizer.backend.to_str())


class Choice(NamedTuple):
    """Which library tokenizes, and why where it is not the fast one."""

    library: Library
    why: str = ""


def choose(tokenizer: Tokenizer, documents: Iterable[str]) -> Choice:
    """gigatoken if its ids are the tokenizer's for a sample of `documents` and for text that tells tokenizers apart."""
    try:
        fast = load_gigatoken(tokenizer)
    except ImportError:
        return Choice("tokenizers", "gigatoken is not installed")
    except BaseException as error:  # it refuses the kinds it does not know, each in its own way
        return _refused("cannot read this tokenizer", error)
    for text in [*_probes(tokenizer), *_sample(documents)]:
        try:
            same = fast.encode(text).tolist() == tokenizer.encode_batch([text])[0]
        except BaseException as error:
            return _refused(f"fails on {text[:40]!r}", error)
        if not same:
            return Choice("tokenizers", f"gigatoken has other ids for {text[:40]!r}")
    return Choice("gigatoken")


def _refused(what: str, error: BaseException) -> Choice:
    if isinstance(error, KeyboardInterrupt | SystemExit):  # a panic of its Rust code is no Exception either
        raise error
    return Choice("tokenizers", f"gigatoken {what}: {' '.join(str(error).split())[:100]}")


def _probes(tokenizer: Tokenizer) -> list[str]:
    """PROBES, and each special token inside text."""
    added = sorted(tokenizer.backend.get_added_tokens_decoder().items())
    return [*PROBES, *(f"one {token.content}two {token.content} three" for _, token in added[:64])]


def _sample(documents: Iterable[str]) -> list[str]:
    """The first documents, as much of them as is soon compared."""
    sample, left = [], SAMPLE_LETTERS
    for text in islice(documents, SAMPLE):
        sample.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    return sample
