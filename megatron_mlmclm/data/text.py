"""Read documents from .jsonl and .txt files, a piece at a time: memory does not grow with the corpus.

.jsonl: one JSON object per line, the document under one key. .txt: one document per line. Blank lines are skipped.
A piece is whole lines, cut alike whatever reads them, so that worker processes can parse pieces of one file.
"""

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from megatron_mlmclm.errors import UserError

SUFFIXES = (".jsonl", ".txt")
# Bytes a piece holds before its last line is completed. Large enough to keep a tokenizer busy for a second; small
# enough that two per worker on a hundred workers stay under a gigabyte.
PIECE_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """Whole lines of one file: `content` begins at line `line` (from 1)."""

    path: str
    line: int
    content: bytes


def find_files(inputs: Iterable[str | Path]) -> list[Path]:
    """The .jsonl and .txt files that `inputs` (files, folders, globs) name, in order; folders and globs are sorted.

    Errors: UserError for a missing file, a folder or glob without such files, another suffix, a file named twice.
    """
    found: dict[Path, Path] = {}
    for given in inputs:
        for path in _expand(str(given)):
            if path.resolve() in found:
                raise UserError(
                    f"{path}: named twice by the inputs; name it once (to repeat a source, weight it in a blend)"
                )
            found[path.resolve()] = path
    if not found:
        raise UserError("no input: name .jsonl or .txt files, folders or globs")
    return list(found.values())


def _expand(given: str) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise UserError(f"{given}: a folder without a .jsonl or .txt file")
        return files
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{given}: is not .jsonl or .txt; unpack or convert it, or rename it")
        return [path]
    matches = glob.glob(given, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    files = sorted(p for p in map(Path, matches) if p.suffix in SUFFIXES and p.is_file())
    if not files:
        what = "matches no .jsonl or .txt file" if glob.has_magic(given) else "no such file or folder"
        raise UserError(f"{given}: {what}")
    return files


def iter_pieces(paths: Iterable[Path], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The files' lines in order, in pieces of about `piece_bytes`."""
    for path in paths:
        line = 1
        try:
            with path.open("rb") as file:
                while content := file.read(piece_bytes):
                    content += file.readline()
                    yield Piece(str(path), line, content.removeprefix(BOM) if line == 1 else content)
                    line += content.count(b"\n")
        except OSError as error:
            raise UserError(f"{path}: cannot read: {error.strerror or error}") from error


def parse_piece(piece: Piece, text_key: str) -> list[str]:
    """The documents of `piece`. Errors: UserError naming file:line."""
    read = _read_jsonl if piece.path.endswith(".jsonl") else _read_plain
    documents = []
    for number, line in enumerate(piece.content.split(b"\n"), piece.line):
        if line and not line.isspace():
            documents.append(read(line, f"{piece.path}:{number}", text_key))
    return documents


def iter_documents(paths: Iterable[Path], text_key: str = "text") -> Iterator[str]:
    """Every document of `paths`, in order. Errors: UserError naming file:line."""
    for piece in iter_pieces(paths):
        yield from parse_piece(piece, text_key)


def _read_plain(line: bytes, place: str, _text_key: str) -> str:
    return _decode(line, place).removesuffix("\r")


def _read_jsonl(line: bytes, place: str, text_key: str) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        _decode(line, place)  # bytes that are not UTF-8 are the likelier and plainer thing to say
        raise UserError(f"{place}: not JSON: {error.msg}, at character {error.pos + 1}") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: a JSON {type(record).__name__}, not an object with the key {text_key!r}")
    if text_key not in record:
        there = ", ".join(map(repr, list(record)[:12])) or "none"
        raise UserError(f"{place}: no key {text_key!r}; its keys are: {there} (choose one with --text-key)")
    text = record[text_key]
    if not isinstance(text, str):
        raise UserError(f"{place}: the value of {text_key!r} is a {type(text).__name__}, not a string")
    return text


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8;"
            " convert the file (iconv -t UTF-8)"
        ) from error
