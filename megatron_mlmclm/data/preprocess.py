"""`mlmclm preprocess`: text -> PREFIX.bin, PREFIX.idx (Megatron's indexed data) and PREFIX.json (who made it).

The text is cut into shards (shards.py), which an engine has made, in any order and on any machine; they are joined in
the order of the text. A run that was cut off goes on where it stood when it is called again.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import orjson

from megatron_mlmclm.aside import commit, discard, os_errors, write_file
from megatron_mlmclm.data.encode import SAMPLE, Choice, choose
from megatron_mlmclm.data.engines import ENGINES, Engine
from megatron_mlmclm.data.indexed import IndexedReader, IndexedWriter, best_dtype, data_path
from megatron_mlmclm.data.merge import refuse_existing
from megatron_mlmclm.data.shards import NAMED, Job, Made, Shard, locked, plan_shards, prefix_of, read_marker
from megatron_mlmclm.data.sources import FORMS, STDIN, Source, find_sources
from megatron_mlmclm.data.text import MAX_DOCUMENT, Reading, Slice, read_slice
from megatron_mlmclm.data.tokenizer import Tokenizer
from megatron_mlmclm.errors import UserError

SIDECAR_VERSION = 1
MB = 1 << 20
SAMPLED_SOURCES = 16  # whose documents are compared before gigatoken is taken
SHARD_BYTES = 32 * MB  # a second's work: little is lost in a crash, and a corpus of terabytes has thousands


@dataclass(frozen=True)
class Options:
    """How to preprocess; the defaults are the verb's."""

    text_keys: Sequence[str] = ("text",)
    workers: int = 1
    overwrite: bool = False
    skip_bad: bool = False  # count bad records instead of ending at the first
    form: str | None = None  # of all inputs, else by suffix
    engine: str = "local"
    ray_address: str | None = None
    slice: tuple[int, int] | None = None  # (rank, of how many): make these shards only, join nothing
    shard_bytes: int = SHARD_BYTES
    max_document: int = MAX_DOCUMENT
    tokenize_with: Literal["auto", "gigatoken", "tokenizers"] = "auto"
    command: Sequence[str] = ()  # for the sidecar


@dataclass(frozen=True)
class Summary:
    """What was written under `prefix`."""

    prefix: str
    documents: int
    tokens: int
    skipped: int  # documents that came to no token
    bad: int  # records left out
    dtype: np.dtype
    library: str  # that tokenized


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl (an object a line), .txt (a document a line), .parquet, .arrow, plain or .gz .zst .bz2 .xz; a"
        " folder (also of datasets' save_to_disk), glob, URL, @FILE (a list), - (standard input)",
    )
    add("--tokenizer", required=True, metavar="DIR", help="folder with tokenizer.json")
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    add("--overwrite", action="store_true", help="replace an existing PREFIX")
    _add_reading(parser.add_argument_group("reading").add_argument)
    _add_work(parser.add_argument_group("work", "none of these changes the bytes written").add_argument)


def _add_reading(add: Callable) -> None:
    add(
        *("--text-key", "--text-keys"),
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="key or column of the text (default: text); of several each has an output of its own, PREFIX_KEY",
    )
    add("--format", choices=FORMS, help="what all inputs are, whatever their suffix (- is jsonl)")
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="a bad record ends the run, or is left out, counted",
    )
    add("--max-document-mb", type=float, default=MAX_DOCUMENT / MB, metavar="MB", help="longer is a bad record (64)")


def _add_work(add: Callable) -> None:
    add("--workers", type=int, metavar="N", help="processes (default: one per CPU)")
    add("--engine", choices=tuple(ENGINES), default="local", help="who makes the shards (default: local processes)")
    add("--ray-address", metavar="ADDRESS", help="of a Ray cluster that shares the files (default: a local one)")
    add("--slice", metavar="I/N", help="make every N-th shard from the I-th (0 to N-1); a call without it joins them")
    add("--shard-mb", type=float, default=SHARD_BYTES / MB, metavar="MB", help="text of a shard (32)")
    libraries = ("auto", "gigatoken", "tokenizers")
    add("--tokenize-with", choices=libraries, default="auto", help="auto: gigatoken if its ids agree")


def run(args: argparse.Namespace) -> None:
    """Preprocess and print a line per output that sums it up. Errors: UserError; nothing half-written stays."""
    options = Options(
        text_keys=tuple(args.text_key),
        workers=args.workers if args.workers is not None else os.cpu_count() or 1,
        overwrite=args.overwrite,
        skip_bad=args.on_error == "skip",
        form=args.format,
        engine=args.engine,
        ray_address=args.ray_address,
        slice=_read_slice(args.slice),
        shard_bytes=_bytes("--shard-mb", args.shard_mb),
        max_document=_bytes("--max-document-mb", args.max_document_mb),
        tokenize_with=args.tokenize_with,
        command=["mlmclm", *sys.argv[1:]],
    )
    begun = time.perf_counter()
    with _stop_on_sigterm():
        done = preprocess(args.inputs, args.tokenizer, args.output, options, say=print)
    passed = time.perf_counter() - begun
    for output in done:
        size = output.tokens * output.dtype.itemsize / 1e6
        print(
            f"{output.prefix}: {output.documents:,} documents ({output.skipped:,} empty, {output.bad:,} bad left out),"
            f" {output.tokens:,} tokens, {output.dtype.name}, {size:,.1f} MB, {output.tokens / passed:,.0f} tokens/s"
            f" with {output.library}"
        )


def preprocess(
    inputs: Sequence[str],
    tokenizer: str,
    output: str,
    options: Options = Options(),  # noqa: B008 (frozen)
    say: Callable[[str], None] = lambda line: None,
) -> list[Summary]:
    """Tokenize `inputs` into the indexed data `output`, one per text key; [] after a slice. Errors: UserError."""
    _check(options)
    prefixes = output_prefixes(output, options.text_keys)
    for prefix in prefixes:
        refuse_existing(prefix, options.overwrite)
    loaded = Tokenizer.load(tokenizer)
    if loaded.eos_id is None:
        raise UserError(
            f"{tokenizer}: names no EOS, which ends each document; set eos_token in its tokenizer_config.json"
        )
    sources = find_sources(inputs, options.form)
    reading = Reading(options.text_keys, options.max_document)
    choice = _choose(loaded, sources, reading, options)
    parts = data_path(output, ".parts")
    job = Job(tokenizer, loaded.fingerprint, choice.library, str(parts), reading, options.skip_bad)
    with locked(parts, shared=options.slice is not None):
        shards = plan_shards(sources, job, options.shard_bytes)
        made = make_shards(job, shards, options, say)
        if options.slice:
            return []
        _tell_bad(made, say)
        _refuse_nothing(parts, made, prefixes, inputs)
        done = _join(job, shards, made, prefixes, best_dtype(loaded.vocab_size))
        for summary in done:
            sidecar = _sidecar(loaded, summary, [source.path for source in sources], options)
            write_file(data_path(summary.prefix, ".json"), sidecar)
        discard(parts)
    return done


def output_prefixes(output: str, keys: Sequence[str]) -> list[str]:
    """PREFIX for one text key, PREFIX_KEY for each of several."""
    prefix = str(data_path(output, ""))
    return [prefix] if len(keys) == 1 else [f"{prefix}_{key}" for key in keys]


def make_shards(job: Job, shards: list[Shard], options: Options, say: Callable[[str], None]) -> list[Made]:
    """Have the shards made that are not, and give what all (or those of this slice) came to, in order."""
    rank, of = options.slice or (0, 1)
    mine = shards[rank::of]
    made = {shard.name: found for shard in mine if (found := read_marker(job, shard)) is not None}
    left = [shard for shard in mine if shard.name not in made]
    if made and left:
        say(f"{job.parts}: {len(made):,} of {len(mine):,} shards are made already; making the others")
    engine: Engine = ENGINES[options.engine]
    try:
        with _progress(left) as advance:
            for shard, result in engine(job, left, options.workers, options.ray_address):
                made[shard.name] = result
                advance(shard.n_bytes)
    except UserError as error:
        whole = sum(read_marker(job, shard) is not None for shard in mine)
        kept = f" ({whole:,} shards are made and kept: the same command goes on with the others)" if whole else ""
        raise UserError(f"{error}{kept}") from error
    if options.slice:
        say(f"{job.parts}: slice {rank} of {of}: {len(mine):,} of {len(shards):,} shards are made")
    return [made[shard.name] for shard in mine]


def _choose(tokenizer: Tokenizer, sources: list[Source], reading: Reading, options: Options) -> Choice:
    """Which library tokenizes; said at the start where it is not the fast one."""
    if options.tokenize_with == "tokenizers":
        return Choice("tokenizers")
    choice = choose(tokenizer, _sample(sources, reading))
    if options.tokenize_with == "gigatoken" and choice.library != "gigatoken":
        raise UserError(f"--tokenize-with gigatoken: {choice.why}")
    if choice.why:
        print(f"tokenizing with tokenizers: {choice.why}", file=sys.stderr)
    return choice


def _sample(sources: list[Source], reading: Reading) -> Iterator[str]:
    """Documents of the user's own, from sources that lie evenly among all."""
    some = [source for source in sources if source.path != STDIN]
    some = some[:: -(-len(some) // SAMPLED_SOURCES)] if some else []
    for source in some:
        batch = next(read_slice(Slice(source), reading, on_bad=lambda error: None), None)
        for column in batch.texts if batch else ():
            yield from column[: SAMPLE // len(some)]


def _refuse_nothing(parts: Path, made: list[Made], prefixes: list[str], inputs: Sequence[str]) -> None:
    """UserError where no document came of a text key; then the shards are worth nothing and go."""
    for key, prefix in enumerate(prefixes):
        if not any(result.documents[key] for result in made):
            discard(parts)
            empty, bad = sum(result.empty[key] for result in made), sum(result.bad for result in made)
            why = f"{empty:,} are empty, {bad:,} bad" if empty or bad else "every line is blank"
            raise UserError(f"{', '.join(inputs)}: no document to write to {prefix}: {why}")


def _join(job: Job, shards: list[Shard], made: list[Made], prefixes: list[str], dtype: np.dtype) -> list[Summary]:
    """Join each key's shards to its prefix; all are written before the first is named."""
    done, bad = [], sum(result.bad for result in made)
    for key, prefix in enumerate(prefixes):
        skipped = sum(result.empty[key] for result in made)
        with IndexedWriter(Path(job.parts) / f"joined-{key}", dtype) as writer:
            for shard, result in zip(shards, made, strict=True):
                if result.documents[key]:
                    writer.add_indexed(IndexedReader(prefix_of(job, shard, key)))
        done.append(Summary(prefix, writer.n_documents, writer.n_tokens, skipped, bad, dtype, job.library))
    for key, prefix in enumerate(prefixes):
        with os_errors(data_path(prefix, ".bin")):
            for suffix in (".json", ".idx"):  # an old one beside new tokens could pass for right
                data_path(prefix, suffix).unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                commit(data_path(Path(job.parts) / f"joined-{key}", suffix), data_path(prefix, suffix))
    return done


def _tell_bad(made: list[Made], say: Callable[[str], None]) -> None:
    named = list(chain.from_iterable(result.named for result in made))[:NAMED]
    for line in named:
        say(f"left out: {line}")
    if (count := sum(result.bad for result in made)) > len(named):
        say(f"left out: {count - len(named):,} more")


def _sidecar(tokenizer: Tokenizer, done: Summary, sources: list[str], options: Options) -> bytes:
    sidecar = {
        "version": SIDECAR_VERSION,
        "tokenizer": str(tokenizer.folder),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": done.dtype.name,
        "documents": done.documents,
        "tokens": done.tokens,
        "skipped": done.skipped,
        "bad": done.bad,
        "sources": sources,
        "command": list(options.command),
    }
    return orjson.dumps(sidecar, option=orjson.OPT_INDENT_2)


def _check(options: Options) -> None:
    if options.workers < 1:
        raise UserError(f"--workers {options.workers}: must be 1 or more")
    if len(set(options.text_keys)) != len(options.text_keys):
        raise UserError(f"--text-key {' '.join(options.text_keys)}: names a key twice")
    if options.ray_address and options.engine != "ray":
        raise UserError("--ray-address: is for --engine ray")


def _read_slice(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    rank, _, of = text.partition("/")
    if not (rank.isdecimal() and of.isdecimal() and int(rank) < int(of)):
        raise UserError(f"--slice {text}: is I/N, with I from 0 to N - 1, such as 0/8")
    return int(rank), int(of)


def _bytes(flag: str, megabytes: float) -> int:
    if not megabytes * MB >= 1:
        raise UserError(f"{flag} {megabytes:g}: must be more than 0")
    return int(megabytes * MB)


@contextlib.contextmanager
def _progress(shards: list[Shard]) -> Iterator[Callable[[int], None]]:
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
        task = bar.add_task("", total=sum(shard.n_bytes for shard in shards))
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
