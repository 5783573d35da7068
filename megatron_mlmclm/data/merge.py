"""`mlmclm merge-data`: several indexed data sets into one, documents in the order given, nothing tokenized again."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.data.indexed import IndexedReader, IndexedWriter, data_path, read_sidecar
from megatron_mlmclm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="indexed data (PREFIX.bin, PREFIX.idx), in order")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing PREFIX")


def run(args: argparse.Namespace) -> None:
    """Merge and print one line that sums it up. Errors: UserError; nothing half-written stays."""
    refuse_existing(args.output, args.overwrite)
    merged = merge(args.prefixes, args.output)
    print(
        f"{data_path(args.output, '')}: {merged.n_documents:,} documents, {merged.n_tokens:,} tokens,"
        f" {merged.dtype.name}, from {len(args.prefixes)} data sets"
    )


def refuse_existing(output: str | Path, overwrite: bool) -> None:
    """UserError if data of that prefix exist and may not be replaced."""
    made = [path for path in (data_path(output, suffix) for suffix in (".bin", ".idx", ".json")) if path.exists()]
    if made and not overwrite:
        raise UserError(f"{made[0]}: exists already; add --overwrite to replace it, or name another --output")


def merge(prefixes: Sequence[str | Path], output: str | Path) -> IndexedWriter:
    """Write `prefixes` one after the other to `output`, and a sidecar that sums up theirs where all have one.

    Errors: UserError for data of different dtypes or tokenizers, and where `output` is one of them.
    """
    sidecars = [read_sidecar(prefix) for prefix in prefixes]
    known = next(((prefix, sidecar) for prefix, sidecar in zip(prefixes, sidecars, strict=True) if sidecar), None)
    dtype = IndexedReader(prefixes[0]).dtype
    for prefix, sidecar in zip(prefixes, sidecars, strict=True):
        reader = IndexedReader(prefix)  # one at a time: each holds two files open
        if reader.dtype != dtype:
            raise UserError(
                f"{prefix}: holds {reader.dtype.name}, {prefixes[0]} holds {dtype.name}: made with vocabularies of"
                " different size; preprocess both with one tokenizer"
            )
        if known and sidecar and sidecar.get("tokenizer_fingerprint") != known[1].get("tokenizer_fingerprint"):
            raise UserError(
                f"{prefix}: its tokenizer ({sidecar.get('tokenizer')}) is not that of {known[0]}"
                f" ({known[1].get('tokenizer')}): their ids mean different text; preprocess both with one"
            )
        if reader.bin_path.resolve() == data_path(output, ".bin").resolve():
            raise UserError(f"{output}: is one of the data sets to merge; name another --output")
    with IndexedWriter(output, dtype) as writer:
        for prefix in prefixes:
            writer.add_indexed(IndexedReader(prefix))
    if all(sidecars):
        write_file(data_path(output, ".json"), orjson.dumps(_sum(sidecars), option=orjson.OPT_INDENT_2))
    return writer


def _sum(sidecars: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {
        key: sum(sidecar.get(key) or 0 for sidecar in sidecars) for key in ("documents", "tokens", "skipped", "bad")
    }
    return {**sidecars[0], **counts, "sources": [path for sidecar in sidecars for path in sidecar.get("sources", [])]}
