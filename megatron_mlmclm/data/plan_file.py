"""PREFIX.S.pack: which pieces of documents lie in which packed sample of S tokens; made by `mlmclm pack`.

Header (80 bytes): magic, then u64 version, seq_length S, samples n, pieces p and tokens of the data, then the data's
fingerprint (32 bytes). Then int64 pieces [p, 2]: place of the first token in the data, and length; then int64 marks
[n + 1]: sample i is pieces [mark i, mark i + 1).
"""

import glob
import mmap
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_mlmclm.aside import commit, discard, os_errors, temp_name
from megatron_mlmclm.data.indexed import IndexedReader, data_path
from megatron_mlmclm.errors import UserError

MAGIC = b"MLMCLMPK"
VERSION = 1  # also of how pieces are shared out: a plan of another version has other samples
HEADER = struct.Struct("<8s5Q32s")
STRETCH = 1 << 20  # samples that `verify` holds at a time


class Packed(NamedTuple):
    """Some samples: their pieces, int64 [pieces, 2] (place and length), and how many each has, int64 [samples]."""

    pieces: np.ndarray
    counts: np.ndarray


def plan_path(prefix: str | Path, seq_length: int) -> Path:
    """Where the plan of `prefix` for samples of `seq_length` is kept."""
    return data_path(prefix, f".{seq_length}.pack")


def find_plans(prefix: str | Path) -> list[int]:
    """The sequence lengths that there are plans for, rising."""
    path = data_path(prefix, "")
    names = [found.name[len(path.name) + 1 : -5] for found in path.parent.glob(f"{glob.escape(path.name)}.*.pack")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_plan(reader: IndexedReader, seq_length: int, samples: Iterable[Packed]) -> Path:
    """Write the plan of `reader`'s data aside, then name it; an older one is replaced. Memory: 4 bytes a sample."""
    path = plan_path(reader.prefix, seq_length)
    temp = temp_name(path)
    counts = array("i")
    try:
        with os_errors(path), temp.open("wb") as file:
            file.write(bytes(HEADER.size))
            for packed in samples:
                file.write(np.ascontiguousarray(packed.pieces, "<i8"))
                counts.frombytes(packed.counts.astype(np.int32).tobytes())
            marks = np.zeros(len(counts) + 1, "<i8")
            np.cumsum(np.frombuffer(counts, np.int32), out=marks[1:])
            file.write(marks)
            file.seek(0)
            numbers = (VERSION, seq_length, len(counts), int(marks[-1]), reader.n_tokens)
            file.write(HEADER.pack(MAGIC, *numbers, bytes.fromhex(reader.fingerprint)))
        with os_errors(path):
            commit(temp, path)
    finally:
        discard(temp)
    return path


class PackPlan:
    """The plan of `reader`'s data for samples of `seq_length`, memory-mapped and checked against the data.

    Attributes: `path`, `n_samples`, `n_pieces`, `padding` (the share of positions that hold no token).
    Errors: UserError for a plan that is missing, cut, or of other data, naming the verb that makes it.
    """

    def __init__(self, reader: IndexedReader, seq_length: int) -> None:
        self.path, self._seq_length = plan_path(reader.prefix, seq_length), seq_length
        self._mend = f"make it with mlmclm pack {reader.prefix} --seq-length {seq_length}"
        self._map = self._open(reader)
        self.n_samples, self.n_pieces, self._n_tokens = self._read_header(reader)
        self.padding = 1.0 - self._n_tokens / (self.n_samples * seq_length)
        self._pieces = np.frombuffer(self._map, "<i8", 2 * self.n_pieces, HEADER.size).reshape(-1, 2)
        marks_at = HEADER.size + 16 * self.n_pieces
        self._marks = np.frombuffer(self._map, "<i8", self.n_samples + 1, marks_at)

    def pieces(self, index: int) -> list[list[int]]:
        """[place of the first token, length] of each piece of sample `index`. IndexError outside."""
        if not 0 <= index < self.n_samples:
            raise IndexError(f"sample {index} of {self.n_samples} in {self.path}")
        return self._pieces[self._marks[index] : self._marks[index + 1]].tolist()

    def verify(self) -> None:
        """Read all of it, a stretch at a time. UserError unless samples fit and hold as many tokens as the data."""
        found = 0
        for start in range(0, self.n_samples, STRETCH):
            marks = self._marks[start : start + STRETCH + 1]
            if start == 0 and marks[0] != 0 or (np.diff(marks) < 1).any() or marks[-1] > self.n_pieces:
                raise UserError(f"{self.path}: its samples are out of order: damaged; {self._mend}")
            totals = np.add.reduceat(self._pieces[marks[0] : marks[-1], 1], marks[:-1] - marks[0])
            if (totals < 1).any() or (totals > self._seq_length).any():
                raise UserError(f"{self.path}: has samples beyond {self._seq_length} tokens: damaged; {self._mend}")
            found += int(totals.sum())
        if found != self._n_tokens:
            raise UserError(f"{self.path}: holds {found:,} tokens of {self._n_tokens:,}: damaged; {self._mend}")

    def _open(self, reader: IndexedReader) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            others = ", ".join(f"{length:,}" for length in find_plans(reader.prefix))
            there = f" (there is one for seq_length {others})" if others else ""
            raise UserError(f"{self.path}: no such plan for data.packing: packed{there}; {self._mend}") from error
        except ValueError as error:
            raise UserError(f"{self.path}: empty (0 bytes); {self._mend}") from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot read: {error.strerror or error}") from error

    def _read_header(self, reader: IndexedReader) -> tuple[int, int, int]:
        """Number of samples, pieces and tokens."""
        size = len(self._map)
        if size < HEADER.size:
            raise UserError(f"{self.path}: {size} bytes, shorter than its header: cut; {self._mend}")
        magic, version, seq_length, samples, pieces, tokens, fingerprint = HEADER.unpack_from(self._map)
        if magic != MAGIC or version != VERSION:
            raise UserError(f"{self.path}: not a plan of version {VERSION}; {self._mend}")
        if size != (promised := HEADER.size + 16 * pieces + 8 * (samples + 1)) or samples < 1:
            raise UserError(f"{self.path}: {size:,} bytes where its header promises {promised:,}: cut; {self._mend}")
        if seq_length != self._seq_length:
            raise UserError(f"{self.path}: is for seq_length {seq_length:,}, not {self._seq_length:,}; {self._mend}")
        if fingerprint.hex() != reader.fingerprint or tokens != reader.n_tokens:
            raise UserError(f"{self.path}: is of other data than {reader.prefix} holds now; {self._mend}")
        return samples, pieces, tokens
