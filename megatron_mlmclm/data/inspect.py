"""`mlmclm inspect`: check indexed data and say what it holds."""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_mlmclm.data.indexed import IndexedReader, read_sidecar
from megatron_mlmclm.data.plan_file import PackPlan, find_plans
from megatron_mlmclm.errors import UserError

CHUNK_TOKENS = 1 << 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("prefix", metavar="PREFIX", help="indexed data is PREFIX.idx and PREFIX.bin")
    parser.add_argument("--deep", action="store_true", help="read every token too: largest id, documents ending in EOS")


def run(args: argparse.Namespace) -> None:
    """Print a table on stdout. Errors: UserError for files that are missing, cut or disagree."""
    reader = IndexedReader(args.prefix)
    reader.verify()
    sidecar = read_sidecar(args.prefix) or {}
    _check_sidecar(reader, sidecar)
    rows = [*_overview(reader, sidecar), *(_deep_look(reader, sidecar) if args.deep else ())]
    for name, value in rows:
        print(f"{name:<12}{value}")


def _check_sidecar(reader: IndexedReader, sidecar: dict[str, Any]) -> None:
    for key, found in (("tokens", reader.n_tokens), ("documents", reader.n_documents), ("dtype", reader.dtype.name)):
        if sidecar.get(key, found) != found:
            raise UserError(
                f"{reader.prefix}.json: says {key} {sidecar[key]}, the data has {found}: it is of other data;"
                " remove it or run mlmclm preprocess again"
            )


def _overview(reader: IndexedReader, sidecar: dict[str, Any]) -> Iterator[tuple[str, str]]:
    lengths = reader.document_lengths()
    yield "documents", f"{reader.n_documents:,}"
    yield "tokens", f"{reader.n_tokens:,}"
    yield "dtype", reader.dtype.name
    yield "lengths", f"shortest {lengths.min():,}, mean {lengths.mean():,.1f}, longest {lengths.max():,} tokens"
    for path in (reader.bin_path, reader.idx_path):
        yield path.suffix, f"{path.stat().st_size:,} bytes"
    if sidecar:
        yield (
            "tokenizer",
            f"{sidecar.get('tokenizer_fingerprint')}, {sidecar.get('vocab_size')} ids, EOS {sidecar.get('eos_id')}",
        )
    else:
        yield "tokenizer", f"unknown ({reader.prefix}.json is not there)"
    for seq_length in find_plans(reader.prefix):
        plan = PackPlan(reader, seq_length)
        plan.verify()
        yield "packed", f"{plan.n_samples:,} samples of {seq_length:,}, {plan.padding:.2%} padding"


def _deep_look(reader: IndexedReader, sidecar: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Read all tokens, a chunk at a time. UserError for an id outside the vocabulary that the sidecar names."""
    eos, vocab_size = sidecar.get("eos_id"), sidecar.get("vocab_size")
    lasts = np.cumsum(reader.document_lengths()) - 1  # place of each document's last token
    largest = smallest = ended = 0
    for start in range(0, reader.n_tokens, CHUNK_TOKENS):
        tokens = reader.tokens(start, min(start + CHUNK_TOKENS, reader.n_tokens))
        largest, smallest = max(largest, int(tokens.max())), min(smallest, int(tokens.min()))
        begin, end = np.searchsorted(lasts, (start, start + len(tokens)))
        ended += int((tokens[lasts[begin:end] - start] == eos).sum())
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        wrong = smallest if smallest < 0 else largest
        raise UserError(
            f"{reader.bin_path}: holds id {wrong}, outside the vocabulary (0 to {vocab_size}): damaged; make it again"
        )
    yield "largest id", f"{largest:,}"
    if eos is not None:
        yield "end in EOS", f"{ended / reader.n_documents:.2%} of documents"
