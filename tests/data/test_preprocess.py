"""Text to indexed data: same bytes for any number of workers, bad lines named, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_mlmclm.data import IndexedReader, Tokenizer
from megatron_mlmclm.data.preprocess import encode_pieces, preprocess
from megatron_mlmclm.data.text import Piece
from megatron_mlmclm.errors import UserError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")


def mlmclm(*arguments, **options):
    command = [sys.executable, "-m", "megatron_mlmclm.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def jsonl(tmp_path, corpus):
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus))
    return path


def test_same_bytes_for_any_worker_count(tmp_path, jsonl, corpus, tokenizer_folder, monkeypatch):
    monkeypatch.setattr("megatron_mlmclm.data.text.iter_pieces.__defaults__", (2000,))
    summaries = [preprocess([str(jsonl)], str(tokenizer_folder), f"{tmp_path}/{n}", workers=n) for n in (1, 3)]
    assert summaries[0] == summaries[1]
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"1{suffix}").read_bytes() == (tmp_path / f"3{suffix}").read_bytes()
    tokenizer, reader = Tokenizer.load(tokenizer_folder), IndexedReader(tmp_path / "3")
    begins = [0, *reader.document_ends(0, reader.n_tokens), reader.n_tokens]
    found = [reader.tokens(a, b).tolist() for a, b in zip(begins, begins[1:], strict=False)]
    assert found == [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(corpus)]


def test_megatron_reads_it_and_the_sidecar_tells(tmp_path, jsonl, corpus, tokenizer_folder):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    jsonl.write_text(jsonl.read_text() + '{"text": ""}\n')
    done = preprocess([str(jsonl)], str(tokenizer_folder), f"{tmp_path}/d")
    dataset, tokenizer = IndexedDataset(f"{tmp_path}/d"), Tokenizer.load(tokenizer_folder)
    assert len(dataset) == len(corpus) == done.documents
    assert tokenizer.decode(dataset[7]) == corpus[7] + "[EOS]"
    assert json.loads((tmp_path / "d.json").read_text()) == {
        "version": 1,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": 320,
        "eos_id": 3,
        "dtype": "uint16",
        "documents": len(corpus),
        "tokens": done.tokens,
        "skipped": 1,
        "sources": [str(jsonl)],
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_stays(tmp_path, jsonl, tokenizer_folder, workers):
    jsonl.write_text(jsonl.read_text() + '{"body": "x"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:401: no key 'text'; its keys are: 'body'"):
        preprocess([str(jsonl)], str(tokenizer_folder), f"{tmp_path}/out/d", workers=workers)
    assert list((tmp_path / "out").iterdir()) == []


def test_refusals(tmp_path, jsonl, tokenizer_folder):
    folder, output = str(tokenizer_folder), f"{tmp_path}/d"
    preprocess([str(jsonl)], folder, output)
    with pytest.raises(UserError, match="d.bin: exists already; add --overwrite"):
        preprocess([str(jsonl)], folder, output)
    preprocess([str(jsonl)], folder, output, overwrite=True)
    with pytest.raises(UserError, match="--workers 0"):
        preprocess([str(jsonl)], folder, f"{tmp_path}/e", workers=0)
    for content, message in ((" \n\n", "every line is blank"), ('{"text": ""}\n', "no document to write")):
        jsonl.write_text(content)
        with pytest.raises(UserError, match=message):
            preprocess([str(jsonl)], folder, f"{tmp_path}/e")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx", "d.json", "in"]


def test_tokenizer_without_eos(tmp_path, jsonl, tokenizer_folder):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="names no EOS.* set eos_token in its tokenizer_config.json"):
        preprocess([str(jsonl)], str(tmp_path / "t"), f"{tmp_path}/d")


def worker_pids(parent: int) -> list[int]:
    """Children of `parent` that are pool workers (the pool's resource tracker is a child too)."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition, seconds=60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@linux
def test_a_killed_worker_ends_the_run_with_an_error(tokenizer_folder):
    piece = Piece("a.txt", 1, b"some words to tokenize\n" * 2000)
    encoded = encode_pieces(iter([piece] * 10_000), str(tokenizer_folder), "text", 2)
    next(encoded)
    os.kill(worker_pids(os.getpid())[0], signal.SIGKILL)
    with pytest.raises(UserError, match="worker process was killed"):
        for _ in encoded:
            pass
    assert worker_pids(os.getpid()) == []


def test_reader_does_not_run_ahead(tokenizer_folder):
    asked = 0

    def pieces():
        nonlocal asked
        for _ in range(50):
            asked += 1
            yield Piece("a.txt", 1, b"words\n")

    for done, _ in enumerate(encode_pieces(pieces(), str(tokenizer_folder), "text", 2), 1):
        assert asked - done <= 4


def test_command_line(tmp_path, jsonl, corpus):
    """The three verbs as a user calls them; one line for a mistake, exit status 2."""
    made = mlmclm("tokenizer", "train", jsonl, "--vocab-size", 300, "--output", tmp_path / "t")
    assert (made.returncode, made.stderr) == (0, "") and "300 pieces, from 400 documents" in made.stdout
    done = mlmclm("preprocess", jsonl.parent, "--tokenizer", tmp_path / "t", "--output", tmp_path / "d", "--workers", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1 and "400 documents, " in done.stdout and "uint16" in done.stdout
    seen = mlmclm("inspect", tmp_path / "d", "--deep")
    assert (seen.returncode, seen.stderr) == (0, "") and "100.00% of documents" in seen.stdout
    (tmp_path / "d.bin").write_bytes((tmp_path / "d.bin").read_bytes()[:-2])
    cut = mlmclm("inspect", tmp_path / "d")
    assert cut.returncode == 2 and cut.stdout == "" and cut.stderr.count("\n") == 1 and "d.bin: " in cut.stderr


@pytest.fixture
def long_run(tmp_path, tokenizer_folder):
    """A command in the midst of its work, writing to OUT/d with two workers."""
    (tmp_path / "a.txt").write_bytes(b"some words to tokenize, a great many of them\n" * 400_000)
    command = [sys.executable, "-m", "megatron_mlmclm.cli", "preprocess", tmp_path / "a.txt", "--tokenizer"]
    run = subprocess.Popen([*command, tokenizer_folder, "--output", tmp_path / "out" / "d", "--workers", "2"])
    try:
        wait_for(lambda: len(worker_pids(run.pid)) == 2)
        time.sleep(0.5)
        yield run
    finally:
        run.kill()
        run.wait()


@linux
def test_sigterm_leaves_nothing(tmp_path, long_run):
    workers = worker_pids(long_run.pid)
    long_run.terminate()
    assert long_run.wait(60) == 143
    assert list((tmp_path / "out").iterdir()) == []
    wait_for(lambda: not any(map(is_running, workers)))


@linux
def test_workers_leave_with_a_killed_parent(long_run):
    workers = worker_pids(long_run.pid)
    long_run.kill()
    wait_for(lambda: not any(map(is_running, workers)))
