"""Preprocessing in shards: plan them, make each, on whatever machine; what is made already is not made again.

A shard is a slice of a source, cut by bytes and never by workers, so the joined data does not depend on who made what.
Of shard S and key K there are PARTS/S-K.bin and .idx (indexed data of its own; none where no document came of it). Its
marker PARTS/S.json is written last: that it is there says the shard is whole. S is a hash of all that decides the
bytes. The folder PARTS may be removed at any time between runs.
"""

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import orjson

from megatron_mlmclm.aside import discard, os_errors, write_file
from megatron_mlmclm.data.encode import Encoder, Library
from megatron_mlmclm.data.indexed import IndexedWriter
from megatron_mlmclm.data.sources import STDIN, Source
from megatron_mlmclm.data.text import Reading, Slice, read_slice
from megatron_mlmclm.data.tokenizer import Tokenizer
from megatron_mlmclm.errors import UserError

VERSION = 1
NAMED = 20  # bad records that a marker names; the rest are counted


@dataclass(frozen=True)
class Job:
    """What all shards have in common. Plain values: it travels to workers and other machines."""

    tokenizer: str  # folder
    fingerprint: str
    library: Library
    parts: str  # folder of the shards
    reading: Reading = field(default_factory=Reading)
    skip_bad: bool = False

    @property
    def identity(self) -> list:
        """What of it decides a shard's bytes; gigatoken and tokenizers give the same ids."""
        return [VERSION, self.fingerprint, list(self.reading.keys), self.reading.max_document]


@dataclass(frozen=True)
class Shard:
    """One task."""

    part: Slice
    name: str
    n_bytes: int  # about what is read


@dataclass
class Made:
    """What a shard came to: per key what was written and left out, and the bad records."""

    documents: list[int]
    tokens: list[int]
    empty: list[int]  # documents that came to no token
    bad: int = 0  # records
    named: list[str] = field(default_factory=list)  # the first bad records, file:line and why


def plan_shards(sources: Sequence[Source], job: Job, shard_bytes: int) -> list[Shard]:
    """The shards of `sources`, in the order of the text. Errors: UserError for a file that cannot be opened."""
    return [
        Shard(part, _name(part, job), n_bytes)
        for source in sources
        for part, n_bytes in _slices(source, shard_bytes)
        if n_bytes
    ]


def _slices(source: Source, shard_bytes: int) -> Iterator[tuple[Slice, int]]:
    """Parts of `source` of about `shard_bytes`, and what each reads; one where workers cannot begin in its midst."""
    parts = max(1, -(-source.size // shard_bytes)) if source.seekable else 1
    if source.form == "arrow" or parts == 1:
        yield Slice(source), max(source.size, 0) if source.seekable or source.size >= 0 else 1
        return
    total = source.size
    if source.form == "parquet":
        from megatron_mlmclm.data.tables import count_row_groups

        total = count_row_groups(source)
        parts = min(parts, total)
    edges = [total * part // parts for part in range(parts + 1)]
    for begin, end in zip(edges, edges[1:], strict=False):
        yield Slice(source, begin, end), source.size // parts


def _name(part: Slice, job: Job) -> str:
    """Tells shards apart by all that decides their bytes, so that one of other text or settings is never taken."""
    text = orjson.dumps([job.identity, list(part.source), part.begin, part.end])
    return hashlib.sha256(text).hexdigest()[:24]


class ShardMaker:
    """Makes shards of one job, in the process that holds it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        tokenizer = Tokenizer.load(job.tokenizer)
        if tokenizer.fingerprint != job.fingerprint:
            raise UserError(f"{job.tokenizer}: changed since the run began; run again")
        self.encoder = Encoder(tokenizer, job.library)

    def __call__(self, shard: Shard) -> Made:
        """Make `shard`, or read what is said of it where it is made. Errors: UserError."""
        found = read_marker(self.job, shard)
        if found is not None:
            return found
        keys = self.job.reading.keys
        made = Made([], [], [0] * len(keys))
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(
                    IndexedWriter(prefix_of(self.job, shard, key), self.encoder.dtype, may_be_empty=True)
                )
                for key in range(len(keys))
            ]
            for batch in read_slice(shard.part, self.job.reading, self._on_bad(made)):
                for key, (writer, texts) in enumerate(zip(writers, batch.texts, strict=True)):
                    encoded = self.encoder(texts)
                    writer.add_documents(encoded.ids, encoded.lengths)
                    made.empty[key] += encoded.empty
            made.documents = [writer.n_documents for writer in writers]
            made.tokens = [writer.n_tokens for writer in writers]
        write_file(marker_of(self.job, shard), orjson.dumps(made))
        return made

    def _on_bad(self, made: Made):  # noqa: ANN202
        def on_bad(error: UserError) -> None:
            if not self.job.skip_bad:
                raise error
            made.bad += 1
            if len(made.named) < NAMED:
                made.named.append(str(error))

        return on_bad


def prefix_of(job: Job, shard: Shard, key: int) -> Path:
    """Where the data of a shard's `key`-th text key is."""
    return Path(job.parts) / f"{shard.name}-{key}"


def marker_of(job: Job, shard: Shard) -> Path:
    """The file that says a shard is whole."""
    return Path(job.parts) / f"{shard.name}.json"


def read_marker(job: Job, shard: Shard) -> Made | None:
    """What is said of a shard that is whole; None for one to be made. Standard input cannot be told from another."""
    path = marker_of(job, shard)
    if shard.part.source.path == STDIN or not path.is_file():
        return None
    made = Made(**orjson.loads(path.read_bytes()))
    if made.bad and not job.skip_bad:  # made when bad records were to be skipped: this run wants to hear of them
        return None
    return made


@contextlib.contextmanager
def locked(parts: Path, shared: bool = False) -> Iterator[None]:
    """Hold the folder of shards, alone or (as one of many slices) together; clear away what a killed run left.

    A folder in which no shard is whole goes at the end. The system lets go of a lock when its process ends, however.
    Errors: UserError where another run holds it.
    """
    with _lock_of(parts, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        if not shared:
            for left in parts.glob(".*.part"):
                discard(left)
        try:
            yield
        finally:
            if not shared and not any(parts.glob("*.json")):
                discard(parts)


def _lock_of(parts: Path, kind: int) -> TextIO:
    """The open file whose lock is held."""
    while True:
        with os_errors(parts):
            parts.mkdir(parents=True, exist_ok=True)
            lock = (parts / "lock").open("a")
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise UserError(f"{parts}: another run is writing there; wait for it, or name another --output") from error
        # A run that ended just now may have removed the folder, and with it the file that was opened here.
        with contextlib.suppress(FileNotFoundError):
            if (parts / "lock").samefile(f"/dev/fd/{lock.fileno()}"):
                return lock
        lock.close()
