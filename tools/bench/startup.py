#!/usr/bin/env python3
"""From nothing to the first samples of a corpus: our dataset against Megatron-Core's GPTDataset.

    python tools/bench/startup.py [--tokens 1e6 1e8 1e10] [--rounds 3] [--folder DIR] [--json FILE]

Each round is a process of its own, which imports first and then takes the time on the wall: ours opens the data as
training does (stream, fingerprint, blend, dataset) and makes 8 masked samples of 2,048 tokens; the peer builds the
indices of one epoch by `BlendedMegatronDatasetBuilder`, its cache folder empty, and reads 8 samples. Documents have
1,000 tokens. The .bin is a hole, so its reads cost no disk. One round is not counted: files are in the page cache.
"""

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from common import compared, fresh, make_parser, tell

DOCUMENT = 1000  # tokens
LENGTH = 2048  # tokens of a sample
SAMPLES = 8
VOCABULARY = 128_256
PACKINGS = ("cut", "documents")
STRETCH = 1_000_000  # documents written at a time


def main() -> None:
    """Run the cases and print them; see the module's docstring."""
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 1e8, 1e10], help="sizes of the corpus")
    parser.add_argument("--folder", type=Path, help="where to put the temporary files (default: the system's place)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        open_once = open_with_megatron if options.job == "megatron" else open_with_ours
        print(open_once(options.prefix, options.job) * 1e3)
        return
    tell(results([int(tokens) for tokens in options.tokens], options.rounds, options.folder), options.json)


def results(sizes: list[int], rounds: int, folder: Path | None) -> Iterator[dict]:
    """Each size by each packing of ours; one measurement of the peer serves both."""
    for tokens in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            prefix = Path(work) / "corpus"
            write_corpus(prefix, max(2, tokens // DOCUMENT))
            jobs = (*PACKINGS, "megatron")
            times = [[milliseconds(job, prefix) for job in jobs] for _ in range(rounds + 1)][1:]
        for place, packing in enumerate(PACKINGS):
            pairs = [(row[place], row[-1]) for row in times]
            yield compared(f"start on {tokens:.0e} tokens ({packing}), GPTDataset", "ms", pairs)


def milliseconds(job: str, prefix: Path) -> float:
    """What a process of its own takes for `job`."""
    shutil.rmtree(prefix.parent / "cache", ignore_errors=True)
    return float(fresh(__file__, "--job", job, "--prefix", str(prefix))[-1])


def write_corpus(prefix: Path, documents: int) -> None:
    """Indexed data of zeros: Megatron's format, int32 tokens, one sequence per document."""
    from megatron_mlmclm.data.indexed import CODES, HEADER, MAGIC, VERSION

    itemsize = np.dtype(np.int32).itemsize
    stretches = [range(n, min(n + STRETCH, documents)) for n in range(0, documents, STRETCH)]
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype(np.int32)], documents, documents + 1))
        for part in stretches:
            file.write(np.full(len(part), DOCUMENT, np.int32))
        for part in stretches:
            file.write(np.arange(part.start, part.stop, dtype=np.int64) * (DOCUMENT * itemsize))
        file.write(np.arange(documents + 1, dtype=np.int64))
    prefix.with_suffix(".bin").touch()
    os.truncate(prefix.with_suffix(".bin"), documents * DOCUMENT * itemsize)


def open_with_ours(prefix: Path, packing: str) -> float:
    """Seconds from nothing to the samples, as a run starts."""
    from megatron_mlmclm.data import EncoderDataset, Reading, Sources, open_stream
    from megatron_mlmclm.objectives import Corruption, Mlm, Vocabulary

    def work() -> None:
        objective = Mlm(Corruption(Vocabulary(VOCABULARY, VOCABULARY - 1, (VOCABULARY - 1,))), 0.3)
        stream = open_stream(prefix, LENGTH, packing, 0)
        _ = stream.fingerprint  # every checkpoint names its data by it
        sources = Sources([stream], [1.0], seed=1)
        dataset = EncoderDataset(1, lambda n: Reading(sources, n, 0, objective, 0, n), VOCABULARY)
        for n in range(SAMPLES):
            _ = dataset[n]

    return timed(work)


def open_with_megatron(prefix: Path, _job: str) -> float:
    """Seconds in which Megatron-Core builds its indices and reads the samples."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=Ids(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def work() -> None:
        train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
        for sample in itertools.islice((train[n] for n in range(len(train))), SAMPLES):
            assert len(sample["tokens"]) == LENGTH

    return timed(work)


class Ids:
    """What GPTDataset asks of a tokenizer: any ids do."""

    vocab_size, eod, pad = VOCABULARY, VOCABULARY - 2, VOCABULARY - 1
    unique_identifiers = {"class": "Ids"}


def timed(work: Callable[[], None]) -> float:
    """Seconds on the wall."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
