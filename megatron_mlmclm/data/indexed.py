"""Megatron's indexed data (PREFIX.bin, PREFIX.idx), read and written without Megatron, byte for byte the same.

.idx: magic (9 bytes), version u64, dtype code u8, sequence count n u64, document count d + 1 u64; then int32 lengths
[n] in tokens, int64 pointers [n] in bytes, int64 document indices [d + 1]: document i is sequences [index i, index
i + 1).
.bin: the tokens of all sequences, one after the other. A PREFIX.json beside them (ours) says which tokenizer made them.
"""

import bisect
import hashlib
import mmap
import shutil
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import orjson

from megatron_mlmclm.aside import commit, discard, os_errors, temp_name
from megatron_mlmclm.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes
# Megatron's codes. Its float codes (6, 7) cannot hold token ids and are refused.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
STRETCH = 1 << 22  # rows of the index that `verify` holds at a time
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron would pick for ids below `vocab_size`: uint16 below 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def data_path(prefix: str | Path, suffix: str) -> Path:
    """PREFIX + `suffix` (".bin", ".idx" or ".json"); a prefix given with .bin or .idx at its end is understood."""
    text = str(prefix)
    return Path(text.removesuffix(".idx").removesuffix(".bin") + suffix)


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """What PREFIX.json says of the data (see preprocess.py), or None where there is no such file."""
    path = data_path(prefix, ".json")
    if not path.exists():
        return None
    try:
        sidecar = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); remove it or run mlmclm preprocess again") from error
    if not isinstance(sidecar, dict):
        raise UserError(f"{path}: not a JSON object; remove it or run mlmclm preprocess again")
    return sidecar


class IndexedReader:
    """One indexed data set as a stream of tokens, memory-mapped. Everything cheap is checked at opening.

    Attributes: `prefix`, `dtype` (numpy), `n_tokens`, `n_sequences`, `n_documents`. Pickles as its prefix (reopens).
    Errors: UserError for a missing, foreign or cut file, naming the file and both numbers.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(data_path(prefix, ""))
        self.idx_path, self.bin_path = data_path(prefix, ".idx"), data_path(prefix, ".bin")
        self._idx = _map(self.idx_path)
        self.dtype, self.n_sequences, self.n_documents = _read_header(self._idx, self.idx_path)
        pointers_at = HEADER.size + 4 * self.n_sequences
        documents_at = pointers_at + 8 * self.n_sequences
        end = documents_at + 8 * (self.n_documents + 1)
        if len(self._idx) != end:
            raise UserError(
                f"{self.idx_path}: {len(self._idx):,} bytes where its header promises {end:,}:"
                " cut or damaged; make it again"
            )
        # The 64-bit tables are never 8-aligned, so numpy would copy them at each search; a memoryview reads in place.
        view = memoryview(self._idx)
        self._pointers = view[pointers_at:documents_at].cast("q")
        self._documents = view[documents_at:end].cast("q")
        self.n_tokens = self._check_tables()
        self._bin = _map(self.bin_path)
        if len(self._bin) != self.n_tokens * self.dtype.itemsize:
            raise UserError(
                f"{self.bin_path}: {len(self._bin):,} bytes where {self.idx_path.name} promises"
                f" {self.n_tokens * self.dtype.itemsize:,}: cut, or of another run; make both again"
            )

    def _check_tables(self) -> int:
        """Check the ends of the tables, give the number of tokens. `verify` reads all: start-up must not grow."""
        if self._documents[0] != 0 or self._documents[-1] != self.n_sequences:
            raise UserError(
                f"{self.idx_path}: documents run from sequence {self._documents[0]:,} to {self._documents[-1]:,},"
                f" not from 0 to {self.n_sequences:,}: damaged; make it again"
            )
        if self._pointers[0] != 0:
            raise UserError(
                f"{self.idx_path}: its first pointer is {self._pointers[0]:,}, not 0: damaged; make it again"
            )
        return self._pointers[-1] // self.dtype.itemsize + int(self.lengths[-1])

    def verify(self) -> None:
        """Read the whole index, a stretch at a time. UserError unless pointers sum up lengths and documents rise."""
        at = 0
        for start in range(0, self.n_sequences, STRETCH):
            lengths = self.lengths[start : start + STRETCH].astype(np.int64)
            ends = at + np.cumsum(lengths * self.dtype.itemsize)
            found = np.frombuffer(self._pointers[start : start + STRETCH], np.int64)
            wrong = np.flatnonzero((found != ends - lengths * self.dtype.itemsize) | (lengths < 0))
            if wrong.size:
                raise UserError(
                    f"{self.idx_path}: sequence {start + wrong[0]:,} is out of place: damaged; make it again"
                )
            at = int(ends[-1])
        for start in range(0, self.n_documents, STRETCH):
            marks = np.frombuffer(self._documents[start : start + STRETCH + 1], np.int64)
            if (np.diff(marks) < 0).any():
                raise UserError(f"{self.idx_path}: its documents are out of order: damaged; make it again")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, int32 [n_sequences]; a read-only view that keeps the file mapped."""
        return np.frombuffer(self._idx, np.int32, self.n_sequences, HEADER.size)

    def document_lengths(self) -> np.ndarray:
        """Tokens per document, a copy, int64 [n_documents]. Reads the whole index."""
        ends = np.append(np.frombuffer(self._pointers, np.int64) // self.dtype.itemsize, self.n_tokens)
        return np.diff(ends[np.frombuffer(self._documents, np.int64)])

    def sequence_counts(self, begin: int, end: int) -> np.ndarray:
        """Sequences of each of the documents `begin` to `end` - 1 (to the last, if there are fewer), a copy, int32."""
        return np.diff(np.frombuffer(self._documents[begin : end + 1], np.int64)).astype(np.int32)

    def document_bounds(self, begin: int, end: int) -> np.ndarray:
        """Where documents `begin` to `end` - 1 begin, and where the last of them ends, a copy, int64 [end - begin + 1].

        Reads that part of the index only, which `verify` has found in order.
        """
        marks = np.frombuffer(self._documents[begin : end + 1], np.int64)
        first = int(marks[0])
        places = np.array(self._pointers[first : int(marks[-1]) + 1], np.int64) // self.dtype.itemsize
        return np.append(places, self.n_tokens)[marks - first]  # the appended one is met by the data's end alone

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, a copy, int64 [stop - start]. IndexError outside 0..n_tokens."""
        self._check_range(start, stop)
        found = np.frombuffer(self._bin, self.dtype, stop - start, start * self.dtype.itemsize)
        return found.astype(np.int64)  # a copy always: a view could outlive the map

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Positions strictly inside (start, stop) at which a new document begins, rising, a copy, int64 [any]."""
        self._check_range(start, stop)
        itemsize = self.dtype.itemsize
        begin = bisect.bisect_right(self._documents, start * itemsize, key=self._first_byte)
        end = bisect.bisect_left(self._documents, stop * itemsize, lo=begin, key=self._first_byte)
        if begin == end:
            return np.empty(0, np.int64)
        marks = np.frombuffer(self._documents[begin:end], np.int64)  # all below n_sequences: they begin before `stop`
        places = np.frombuffer(self._pointers[marks[0] : marks[-1] + 1], np.int64)[marks - marks[0]] // itemsize
        return places[np.append(True, places[1:] != places[:-1])]  # without the repeats that empty documents make

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.n_tokens} in {self.prefix}")

    def _first_byte(self, sequence: int) -> int:
        return self._pointers[sequence] if sequence < self.n_sequences else self.n_tokens * self.dtype.itemsize

    @property
    def fingerprint(self) -> str:
        """A hash (64 hex digits) of the header and of 64 places spread over index and tokens; reads about 70 KB."""
        digest = hashlib.sha256(self._idx[: HEADER.size])
        for table in (self._idx, self._bin):
            digest.update(len(table).to_bytes(8, "little"))
            for place in range(64):
                start = max(0, len(table) - 512) * place // 63  # the first is at 0, the last ends the file
                digest.update(table[start : start + 512])
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.n_tokens

    def __reduce__(self) -> tuple[type["IndexedReader"], tuple[str]]:
        return IndexedReader, (self.prefix,)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; indexed data is PREFIX.idx and PREFIX.bin, give PREFIX") from error
    except ValueError as error:
        raise UserError(f"{path}: empty (0 bytes); make it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}") from error


def _read_header(idx: mmap.mmap, path: Path) -> tuple[np.dtype, int, int]:
    """dtype, sequence count and document count of a mapped .idx. UserError if it is not one that holds documents."""
    if len(idx) < HEADER.size:
        raise UserError(f"{path}: {len(idx)} bytes, shorter than the {HEADER.size} of a header: cut; make it again")
    magic, version, code, sequences, documents = HEADER.unpack_from(idx)
    if magic != MAGIC:
        raise UserError(f"{path}: begins with {magic!r}, not {MAGIC!r}: not Megatron indexed data")
    if version != VERSION:
        raise UserError(f"{path}: version {version}, only {VERSION} is known")
    if code not in DTYPES:
        raise UserError(f"{path}: dtype code {code}, known for token ids: {', '.join(map(str, DTYPES))}")
    if sequences == 0 or documents < 2:
        raise UserError(f"{path}: {sequences} sequences, {documents} document marks: holds no document; make it again")
    return np.dtype(DTYPES[code]), sequences, documents - 1


class IndexedWriter:
    """Context manager that writes PREFIX.bin and PREFIX.idx aside and names them at the end, or leaves nothing.

    One sequence per document, unless told otherwise. Memory grows by 8 bytes a document. Existing files are replaced on
    success only; then an older PREFIX.json goes too, for it would describe other data. Without any document it raises
    UserError, or makes no file where it `may_be_empty`.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type, may_be_empty: bool = False) -> None:
        self.idx_path, self.bin_path = data_path(prefix, ".idx"), data_path(prefix, ".bin")
        self._sidecar_path = data_path(prefix, ".json")
        self.dtype = np.dtype(dtype)
        self.may_be_empty = may_be_empty
        self._code = CODES[self.dtype]
        self._lengths = array("i")  # tokens of each sequence
        self._counts = array("i")  # sequences of each document
        self.n_tokens = 0

    @property
    def n_documents(self) -> int:
        """Documents written so far."""
        return len(self._counts)

    def __enter__(self) -> Self:
        self._bin_temp, self._idx_temp = temp_name(self.bin_path), temp_name(self.idx_path)
        with os_errors(self.bin_path):
            self._bin = self._bin_temp.open("wb")
        return self

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document, ids [length >= 1]."""
        self.add_documents(np.asarray(ids), [len(ids)])

    def add_documents(
        self,
        flat_ids: np.ndarray,
        lengths: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Append documents: integer ids [sum of lengths] one after the other, and lengths [sequences], all >= 1.

        counts [documents] says how many sequences each document has, 0 included; without it, one each.
        Errors: UserError for an id that the dtype cannot hold; ValueError for lengths or counts that do not fit.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        shares = np.ones(sizes.size, np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
        if shares.sum() != sizes.size or (shares < 0).any():
            raise ValueError(f"{shares.size} documents do not share out {sizes.size} sequences")
        if sizes.size:
            if sizes.min() < 1 or sizes.max() > np.iinfo(np.int32).max or sizes.sum() != len(flat_ids):
                raise ValueError(f"lengths from {sizes.min()} to {sizes.max()} do not share out {len(flat_ids)} ids")
            self._check_ids(flat_ids)
            with os_errors(self.bin_path):
                self._bin.write(np.ascontiguousarray(flat_ids, dtype=self.dtype))
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._counts.frombytes(shares.astype(np.int32).tobytes())
        self.n_tokens += len(flat_ids)

    def add_indexed(self, reader: IndexedReader) -> None:
        """Append all of `reader`, sequences and documents as they are. ValueError for another dtype."""
        if reader.dtype != self.dtype:
            raise ValueError(f"{reader.prefix} holds {reader.dtype}, not {self.dtype}")
        with os_errors(self.bin_path), reader.bin_path.open("rb") as file:
            shutil.copyfileobj(file, self._bin, 1 << 22)
        self._lengths.frombytes(reader.lengths.view(np.uint8))
        for start in range(0, reader.n_documents, STRETCH):
            self._counts.frombytes(reader.sequence_counts(start, start + STRETCH).tobytes())
        self.n_tokens += reader.n_tokens

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.dtype.kind not in "iu":
            raise ValueError(f"token ids are integers, not {ids.dtype}")
        low, high, limit = int(ids.min()), int(ids.max()), int(np.iinfo(self.dtype).max)
        if low < 0 or high > limit:
            wrong = low if low < 0 else high
            raise UserError(
                f"{self.bin_path}: id {wrong:,} does not fit {self.dtype.name} (0 to {limit:,}), document"
                f" {self.n_documents:,} or soon after; the tokenizer's ids go beyond the vocabulary size given"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with os_errors(self.bin_path):
                self._bin.close()
                if kind is None:
                    self._finish()
        finally:
            discard(self._bin_temp)
            discard(self._idx_temp)

    def _finish(self) -> None:
        if not self._lengths:
            if self.may_be_empty:
                return
            raise UserError(f"{self.bin_path}: no document to write; the input is empty")
        self._write_index()
        # An old index beside new tokens, or an old sidecar beside new data, could pass for right: they go first.
        self._sidecar_path.unlink(missing_ok=True)
        self.idx_path.unlink(missing_ok=True)
        commit(self._bin_temp, self.bin_path)
        commit(self._idx_temp, self.idx_path)

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        with self._idx_temp.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), self.n_documents + 1))
            file.write(lengths)
            _write_starts(file, lengths, self.dtype.itemsize)
            counts = np.frombuffer(self._counts, dtype=np.int32)
            total = _write_starts(file, counts, 1)
            file.write(np.array([total], np.int64))


def _write_starts(file: BinaryIO, sizes: np.ndarray, unit: int) -> int:
    """Write where each of `sizes` begins when they stand one after the other, int64, in units of `unit`; give the end.

    A stretch at a time: all of a large corpus would be another 8 bytes a document.
    """
    at = 0
    for start in range(0, len(sizes), STRETCH):
        ends = at + np.cumsum(sizes[start : start + STRETCH], dtype=np.int64) * unit
        file.write(np.concatenate(([at], ends[:-1])).astype(np.int64))
        at = int(ends[-1])
    return at
