"""Which tokens of a tokenizer make up a word, read off its own tokenizer.json."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import orjson
from tokenizers.pre_tokenizers import PreTokenizer

from megatron_mlmclm.data.tokenizer import Tokenizer
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import WordMarks

MARK = "▁"  # how SentencePiece writes a space
TAIL, HEAD = 3, 2  # characters looked at on either side: Llama 3 ends a word after three digits
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
# Bytes that are no whole character are decoded to lone surrogates; this one stands for all that cannot begin one.
MIDDLE = "\udc80"
SYMBOL_BYTES = (0xC2, 0xE2, 0xF0)  # begin few letters: Latin-1 signs; dashes, quotes, arrows; emoji

Cuts = Callable[[str, str], bool]  # whether a word ends between a piece with this end and one with this beginning


def word_marks(tokenizer: Tokenizer) -> WordMarks:
    """Which tokens begin a word as `tokenizer` itself cuts words, as far as a token and the one before it tell.

    WordLevel: every token does. WordPiece: pieces without its prefix do. SentencePiece: pieces with ▁. Byte-level BPE:
    pieces with Ġ. In the last two the pre-tokenizer also says whether it cuts between the kinds of characters that meet
    (letters, digits, other). Special tokens, added tokens and ids without a piece share no word with a neighbour.

    Raises:
        UserError: its pieces do not tell where words begin.
    """
    settings = orjson.loads(tokenizer.backend.to_str())
    pieces = {number: piece for piece, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    alone = np.ones(tokenizer.vocab_size, dtype=bool)
    alone[list(pieces)] = False
    alone[[*tokenizer.special_ids, *tokenizer.backend.get_added_tokens_decoder()]] = True
    text = {number: piece for number, piece in pieces.items() if not alone[number]}
    model = settings["model"]
    if model["type"] == "WordLevel":
        return _marks(dict.fromkeys(text, ""), dict.fromkeys(text, ""), lambda _tail, _head: True, alone)
    if prefix := model.get("continuing_subword_prefix"):
        heads = {number: piece[: len(prefix)] for number, piece in text.items()}
        return _marks(dict.fromkeys(text, ""), heads, lambda _tail, head: head != prefix, alone)
    spell = _spelling(settings, text)
    if spell is None:
        raise UserError(
            f"{tokenizer.folder}: its pieces do not tell where words begin; take a tokenizer with ##, ▁ or Ġ pieces,"
            " such as `mlmclm tokenizer train` makes, or selection: exact or spans"
        )
    text = {number: spell(piece) for number, piece in text.items()}
    tails = {number: _kinds(piece[-TAIL:]) for number, piece in text.items()}
    heads = {number: _kinds(piece[:HEAD]) for number, piece in text.items()}
    return _marks(tails, heads, _cuts_of(tokenizer.backend.pre_tokenizer), alone)


def _marks(tails: dict[int, str], heads: dict[int, str], cuts: Cuts, alone: np.ndarray) -> WordMarks:
    """Marks from how each id ends and begins; each pair that occurs is asked about once."""
    rows, row_of = _numbered(tails, len(alone))
    columns, column_of = _numbered(heads, len(alone))
    splits = [[cuts(tail, head) for head in columns] for tail in rows]
    return WordMarks.of(row_of, column_of, np.array(splits, dtype=bool).reshape(len(rows), len(columns)), alone)


def _numbered(labels: dict[int, str], size: int) -> tuple[list[str], np.ndarray]:
    """The different labels, and the place of each id's label among them, int16 [size]."""
    places = {label: place for place, label in enumerate(dict.fromkeys(labels.values()))}
    numbers = np.zeros(size, dtype=np.int16)
    numbers[list(labels)] = [places[label] for label in labels.values()]
    return list(places), numbers


def _spelling(settings: dict[str, Any], text: dict[int, str]) -> Callable[[str], str] | None:
    """How a piece is spelled as text, where spaces are part of pieces; None where they are not."""
    if any(part["type"] == "ByteLevel" for part in _parts(settings["pre_tokenizer"])):
        return _from_bytes
    rules = [*_parts(settings["pre_tokenizer"]), *_parts(settings["normalizer"])]
    marked = any(MARK in (rule.get("replacement"), rule.get("content")) for rule in rules)
    if marked and any(piece.startswith(MARK) for piece in text.values()):
        return _from_fallback if settings["model"].get("byte_fallback") else str
    return None


def _parts(rule: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer and, of a sequence, its parts."""
    if rule is not None:
        yield rule
        for part in rule.get("pretokenizers", rule.get("normalizers", ())):
            yield from _parts(part)


@cache
def _byte_table() -> dict[int, int]:
    """GPT-2's alphabet, from the code of a letter to the byte it stands for: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}


def _from_bytes(piece: str) -> str:
    return _decode(piece.translate(_byte_table()).encode("latin-1", "replace"))


def _from_fallback(piece: str) -> str:
    byte = BYTE_PIECE.fullmatch(piece)
    return _decode(bytes.fromhex(byte[1])) if byte else piece


def _decode(spelled: bytes) -> str:
    """Text; of a character cut in two, its first byte or `MIDDLE` (as lone surrogates) stands for what is there."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return re.sub("(?<=.)[\udc80-\udcbf]+", "", spelled.decode(errors="surrogateescape"), flags=re.DOTALL)


def _kinds(text: str) -> str:
    return "".join(map(_kind, text))


@cache
def _kind(char: str) -> str:
    """One character for all that tokenizers treat alike."""
    if "\udc80" <= char <= "\udcff":
        return MIDDLE if char < "\udcc0" else "." if ord(char) - 0xDC00 in SYMBOL_BYTES else "a"
    if char in f"{MARK} ":
        return char
    if char.isspace():
        return "\n" if char in "\r\n" else "\t"
    category = unicodedata.category(char)
    named = {"Lu": "A", "Lt": "A", "Lo": "東"}
    return named.get(category) or {"L": "a", "N": "1", "M": "\u0301"}.get(category[0], ".")


def _cuts_of(pre_tokenizer: PreTokenizer | None) -> Cuts:
    """Words end before a space that a piece begins with, and where the pre-tokenizer cuts."""

    def cuts(tail: str, head: str) -> bool:
        if head.startswith(MIDDLE):
            return False
        if head.startswith(MARK) or re.match(r" \S", head):
            return True
        if pre_tokenizer is None:
            return False
        # GPT-2 leaves a run's last space to the text after it: where a token is one space, there is such a text.
        follow = "a" if len(head) == 1 and head.isspace() else ""
        tail = tail.replace(MIDDLE, "a")
        found = pre_tokenizer.pre_tokenize_str(tail + head + follow)
        return any(start == len(tail) for _, (start, _) in found)

    return cuts
