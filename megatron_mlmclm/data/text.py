"""Read documents from sources, a bounded batch at a time: memory does not grow with the corpus or with a line.

Workers share a file by slices: a line belongs to the slice in which it begins, a row group of a parquet file likewise.
Blank lines are skipped. A bad record is handed to `on_bad`, which raises it or counts it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import orjson

from megatron_mlmclm.data.sources import Source, opened
from megatron_mlmclm.errors import UserError

# Bytes a batch of lines holds before its last line is completed: enough to keep a tokenizer busy, little enough that
# a worker's batch, its strings and its ids stay within some tens of megabytes.
BATCH_BYTES = 4 << 20
MAX_DOCUMENT = 64 << 20  # bytes of a line or of a row's text: beyond it a file is likelier broken than a document long
BOM = b"\xef\xbb\xbf"
BadRecord = Callable[[UserError], None]


class Slice(NamedTuple):
    """Part of a source: the lines that begin at bytes [begin, end), or the parquet row groups [begin, end)."""

    source: Source
    begin: int = 0
    end: int | None = None  # None: to the end


class Batch(NamedTuple):
    """Documents read together: one list per text key, all of one length; and the bytes they were read from."""

    texts: list[list[str]]
    n_bytes: int


class Reading(NamedTuple):
    """What is read of a record, and what is too much."""

    keys: Sequence[str] = ("text",)
    max_document: int = MAX_DOCUMENT
    batch_bytes: int = BATCH_BYTES


def stop(error: UserError) -> None:
    """The `on_bad` that ends a run at its first bad record."""
    raise error


def read_slice(part: Slice, reading: Reading, on_bad: BadRecord = stop) -> Iterator[Batch]:
    """The documents of `part`, in order. Errors: UserError naming file:line (or row), and what `on_bad` raises."""
    if part.source.form in ("parquet", "arrow"):
        from megatron_mlmclm.data.tables import read_table

        yield from read_table(part, reading, on_bad)
        return
    parse = _LineParser(part, reading, on_bad)
    with opened(part.source) as file:
        for content, too_long in _line_batches(file, part, reading):
            yield parse(content, too_long)


def iter_documents(sources: Iterable[Source], text_key: str = "text") -> Iterator[str]:
    """Every document of `sources`, in order. Errors: UserError naming file:line."""
    for source in sources:
        for batch in read_slice(Slice(source), Reading((text_key,))):
            yield from batch.texts[0]


def _line_batches(file: BinaryIO, part: Slice, reading: Reading) -> Iterator[tuple[bytes, bool]]:
    """Whole lines, about `batch_bytes` together, and whether a line too long for a document follows them."""
    at = part.begin
    if at:
        file.seek(at - 1)
        at += _skip_line(file) - 1  # the line that was begun before is another slice's
    while part.end is None or at < part.end:
        most = reading.batch_bytes if part.end is None else min(reading.batch_bytes, part.end - at)
        content = file.read(most)
        if not content:
            return
        read = len(content)
        begun = len(content) - content.rfind(b"\n") - 1  # bytes of the last line, which may go on
        if begun:
            rest = file.readline(max(0, reading.max_document - begun) + 1)
            content += rest
            read += len(rest)
        too_long = begun > 0 and not content.endswith(b"\n") and len(rest) > reading.max_document - begun
        if too_long:
            content = content[: content.rfind(b"\n") + 1]
            read += _skip_line(file)
        yield content.removeprefix(BOM) if at == 0 else content, too_long
        at += read


def _skip_line(file: BinaryIO) -> int:
    """Read up to the end of the line without keeping it; how many bytes that was."""
    skipped = 0
    while found := file.readline(1 << 20):
        skipped += len(found)
        if found.endswith(b"\n"):
            break
    return skipped


class _LineParser:
    """Lines -> documents, counting lines as it goes."""

    def __init__(self, part: Slice, reading: Reading, on_bad: BadRecord) -> None:
        self.part, self.reading, self.on_bad = part, reading, on_bad
        self.read = _read_jsonl if part.source.form == "jsonl" else _read_plain
        self.passed = 0  # lines of this slice
        self._before: int | None = None if part.begin else 0

    def __call__(self, content: bytes, too_long: bool) -> Batch:
        keys = self.reading.keys
        texts: list[list[str]] = [[] for _ in keys]
        lines = content.split(b"\n")
        for number, line in enumerate(lines):
            if not line or line.isspace():
                continue
            try:
                if len(line) > self.reading.max_document:
                    raise UserError(excess(self.reading))
                for column, text in zip(texts, self.read(line, keys), strict=True):
                    column.append(text)
            except UserError as error:
                self._bad(number, error)
        self.passed += len(lines) - 1
        if too_long:
            self._bad(0, UserError(excess(self.reading)))
            self.passed += 1
        return Batch(texts, len(content))

    def _bad(self, number: int, error: UserError) -> None:
        line = 1 + self._lines_before() + self.passed + number
        self.on_bad(UserError(f"{self.part.source.path}:{line}: {error}"))

    def _lines_before(self) -> int:
        """Lines before this slice: counted only when there is something to say of one."""
        if self._before is None:
            self._before, left = 0, self.part.begin
            with opened(self.part.source) as file:
                while left and (block := file.read(min(left, 1 << 20))):
                    self._before += block.count(b"\n")
                    left -= len(block)
                # A slice may begin in the midst of a line, which the slice before it reads.
                if self.part.begin and not block.endswith(b"\n"):
                    self._before += 1
        return self._before


def excess(reading: Reading) -> str:
    """What is said of a document beyond the limit."""
    return (
        f"a document of more than {reading.max_document / 2**20:,.0f} MB; split it, or allow it with --max-document-mb"
        " (--on-error skip leaves it out)"
    )


def _read_plain(line: bytes, keys: Sequence[str]) -> list[str]:
    return [_decode(line).removesuffix("\r")] * len(keys)


def _read_jsonl(line: bytes, keys: Sequence[str]) -> list[str]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        _decode(line)  # bytes that are not UTF-8 are the likelier and plainer thing to say
        raise UserError(f"not JSON: {error.msg}, at character {error.pos + 1}") from error
    if not isinstance(record, dict):
        raise UserError(f"a JSON {type(record).__name__}, not an object with the key {keys[0]!r}")
    texts = [record.get(key) for key in keys]
    if not all(type(text) is str for text in texts):
        raise UserError(_wrong_value(record, keys))
    return texts


def _wrong_value(record: dict, keys: Sequence[str]) -> str:
    for key in keys:
        if key not in record:
            there = ", ".join(map(repr, list(record)[:12])) or "none"
            return f"no key {key!r}; its keys are: {there} (choose one with --text-key)"
        if not isinstance(record[key], str):
            what = "null" if record[key] is None else f"a {type(record[key]).__name__}"
            return f"the value of {key!r} is {what}, not a string"
    raise AssertionError("all keys hold strings")


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; convert the file (iconv -t UTF-8)"
        ) from error
