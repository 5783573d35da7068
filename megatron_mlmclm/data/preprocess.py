"""`mlmclm preprocess`: text -> PREFIX.bin, PREFIX.idx (Megatron's indexed data) and PREFIX.json (who made it).

The reader hands pieces of text to worker processes and writes their ids in the order of the pieces: the bytes do not
depend on the number of workers. At most two pieces per worker are under way, so memory does not grow with the corpus.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.data.indexed import IndexedWriter, best_dtype, data_path
from megatron_mlmclm.data.text import Piece, find_files, iter_pieces, parse_piece
from megatron_mlmclm.data.tokenizer import Tokenizer
from megatron_mlmclm.data.workers import in_order
from megatron_mlmclm.errors import UserError

SIDECAR_VERSION = 1


class Encoded(NamedTuple):
    """One piece, tokenized: ids [sum of lengths] in the output's dtype, lengths int32 [documents], EOS counted."""

    ids: np.ndarray
    lengths: np.ndarray
    skipped: int  # documents that came to no token
    n_bytes: int  # of text


class Summary(NamedTuple):
    """What was written."""

    documents: int
    tokens: int
    skipped: int
    dtype: np.dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl (one object per line), .txt (one document per line), folder, glob",
    )
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder with tokenizer.json")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key of the text in .jsonl (default: text)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU); any N, same bytes")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing PREFIX")


def run(args: argparse.Namespace) -> None:
    """Preprocess and print one line that sums it up. Errors: UserError; nothing half-written stays."""
    workers = args.workers if args.workers is not None else os.cpu_count() or 1
    begun = time.perf_counter()
    with _stop_on_sigterm():
        done = preprocess(args.inputs, args.tokenizer, args.output, args.text_key, workers, args.overwrite)
    rate = done.tokens / (time.perf_counter() - begun)
    skipped = f" ({done.skipped:,} empty skipped)" if done.skipped else ""
    print(
        f"{data_path(args.output, '')}: {done.documents:,} documents{skipped}, {done.tokens:,} tokens,"
        f" {done.dtype.name}, {done.tokens * done.dtype.itemsize / 1e6:,.1f} MB, {rate:,.0f} tokens/s"
    )


def preprocess(
    inputs: list[str], tokenizer: str, output: str, text_key: str = "text", workers: int = 1, overwrite: bool = False
) -> Summary:
    """Tokenize `inputs` into the indexed data `output` with `workers` processes. Errors: UserError."""
    if workers < 1:
        raise UserError(f"--workers {workers}: must be 1 or more")
    made = [path for path in (data_path(output, suffix) for suffix in (".bin", ".idx", ".json")) if path.exists()]
    if made and not overwrite:
        raise UserError(f"{made[0]}: exists already; add --overwrite to replace it, or name another --output")
    loaded = Tokenizer.load(tokenizer)
    if loaded.eos_id is None:
        raise UserError(
            f"{tokenizer}: names no EOS, which ends each document; set eos_token in its tokenizer_config.json"
        )
    files = find_files(inputs)
    pieces = _nonempty(iter_pieces(files), inputs)
    dtype, skipped = best_dtype(loaded.vocab_size), 0
    with IndexedWriter(output, dtype) as writer, _progress(files) as advance:
        for encoded in encode_pieces(pieces, tokenizer, text_key, workers):
            writer.add_documents(encoded.ids, encoded.lengths)
            skipped += encoded.skipped
            advance(encoded.n_bytes)
        done = Summary(writer.n_documents, writer.n_tokens, skipped, dtype)
    write_file(data_path(output, ".json"), _sidecar(loaded, done, files))
    return done


def encode_pieces(pieces: Iterable[Piece], tokenizer: str, text_key: str, workers: int) -> Iterator[Encoded]:
    """Tokenize `pieces`, in order. Errors: UserError of the first bad line, or when a worker is killed."""
    return in_order(_Encoder, (tokenizer, text_key), pieces, workers)


class _Encoder:
    """Text of a piece -> ids, each document ended by EOS."""

    def __init__(self, tokenizer: str, text_key: str) -> None:
        # One worker is one process is one thread: the tokenizer's own threads would fight over the CPUs.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.tokenizer = Tokenizer.load(tokenizer)
        self.text_key = text_key
        self.dtype = best_dtype(self.tokenizer.vocab_size)

    def __call__(self, piece: Piece) -> Encoded:
        documents = parse_piece(piece, self.text_key)
        filled = [ids for ids in self.tokenizer.encode_batch(documents) if ids]
        for ids in filled:
            ids.append(self.tokenizer.eos_id)
        lengths = np.fromiter(map(len, filled), np.int32, len(filled))
        flat = np.fromiter(chain.from_iterable(filled), self.dtype, int(lengths.sum(dtype=np.int64)))
        return Encoded(flat, lengths, len(documents) - len(filled), len(piece.content))


def _nonempty(pieces: Iterator[Piece], inputs: list[str]) -> Iterator[Piece]:
    """`pieces`; UserError at the end if none held more than blank space."""
    seen = False
    for piece in pieces:
        if seen or not piece.content.isspace():
            seen = True
            yield piece
    if not seen:
        raise UserError(f"{', '.join(inputs)}: holds no document; every line is blank")


def _sidecar(tokenizer: Tokenizer, done: Summary, files: list[Path]) -> bytes:
    sidecar = {
        "version": SIDECAR_VERSION,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": done.dtype.name,
        "documents": done.documents,
        "tokens": done.tokens,
        "skipped": done.skipped,
        "sources": [str(path) for path in files],
    }
    return orjson.dumps(sidecar, option=orjson.OPT_INDENT_2)


@contextlib.contextmanager
def _progress(files: list[Path]) -> Iterator:
    """Give a function that moves a bar on stderr by so many bytes of text; it does nothing where no one looks on."""
    if not sys.stderr.isatty():
        yield lambda n_bytes: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(path.stat().st_size for path in files))
        yield lambda n_bytes: bar.advance(task, n_bytes)


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Let SIGTERM (a scheduler's limit) unwind the stack, so that temporary files and workers go too. Status 143."""

    def stop(*_: object) -> None:
        raise SystemExit(143)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
