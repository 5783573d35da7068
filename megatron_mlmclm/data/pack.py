"""`mlmclm pack`: which documents share a sample, for `data.packing: packed`; a pure function of (data, S)."""

import argparse
import time
from collections.abc import Iterator

import numpy as np

from megatron_mlmclm.data.fit import best_fit
from megatron_mlmclm.data.indexed import IndexedReader
from megatron_mlmclm.data.plan_file import Packed, PackPlan, write_plan
from megatron_mlmclm.errors import UserError

WINDOW = 1 << 16  # documents packed among themselves, so that memory does not grow with the data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("prefix", metavar="PREFIX", help="indexed data is PREFIX.idx and PREFIX.bin")
    parser.add_argument(
        "--seq-length", type=int, required=True, metavar="S", help="model.seq_length; writes PREFIX.S.pack"
    )


def run(args: argparse.Namespace) -> None:
    """Write the plan and print one line that sums it up. Errors: UserError; nothing half-written stays."""
    begun = time.perf_counter()
    plan = pack(args.prefix, args.seq_length)
    print(
        f"{plan.path}: {plan.n_samples:,} samples of {args.seq_length:,}, {plan.n_pieces:,} documents or pieces,"
        f" {plan.padding:.2%} padding, {plan.path.stat().st_size / 1e6:,.1f} MB, {time.perf_counter() - begun:,.1f} s"
    )


def pack(prefix: str, seq_length: int) -> PackPlan:
    """Plan the samples of `seq_length` for `prefix`, replacing an older plan. Errors: UserError."""
    if seq_length < 1:
        raise UserError(f"--seq-length {seq_length}: must be 1 or more")
    reader = IndexedReader(prefix)
    reader.verify()
    write_plan(reader, seq_length, _samples(reader, seq_length))
    return PackPlan(reader, seq_length)


def _samples(reader: IndexedReader, seq_length: int) -> Iterator[Packed]:
    for first in range(0, reader.n_documents, WINDOW):
        bounds = reader.document_bounds(first, min(first + WINDOW, reader.n_documents))
        yield pack_documents(bounds, seq_length)


def pack_documents(bounds: np.ndarray, seq_length: int) -> Packed:
    """Samples from documents one after the other: document i is tokens [bounds i, bounds i + 1), int64 [documents + 1].

    Documents in a sample keep their order. Full pieces come first.
    """
    pieces = _pieces(bounds, seq_length)
    full = pieces[:, 1] == seq_length
    bins = np.empty(len(pieces), np.int64)
    bins[full] = np.arange(full.sum())
    bins[~full] = full.sum() + best_fit(pieces[~full, 1], seq_length)
    return Packed(pieces[np.argsort(bins, kind="stable")], np.bincount(bins))


def _pieces(bounds: np.ndarray, seq_length: int) -> np.ndarray:
    """Documents, those longer than `seq_length` cut: place and length of each piece, int64 [pieces, 2]."""
    counts = -(-np.diff(bounds) // seq_length)
    before = np.repeat(np.cumsum(counts) - counts, counts)  # pieces before each piece's document
    starts = np.repeat(bounds[:-1], counts) + (np.arange(len(before)) - before) * seq_length
    ends = np.minimum(starts + seq_length, np.repeat(bounds[1:], counts))
    return np.stack([starts, ends - starts], axis=1)
