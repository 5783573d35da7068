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
from megatron_mlmclm.data.preprocess import Options, preprocess
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


def run(jsonl, folder, output, **options):
    """`preprocess` in small shards."""
    (done,) = preprocess([str(jsonl)], str(folder), str(output), Options(**{"shard_bytes": 4000, **options}))
    return done


def test_same_bytes_for_any_workers_shards_and_library(tmp_path, jsonl, corpus, tokenizer_folder):
    ways = {
        "1": {},
        "2": {"workers": 2},
        "4": {"workers": 4, "shard_bytes": 700},
        "whole": {"shard_bytes": 1 << 30},
        "hf": {"workers": 2, "tokenize_with": "tokenizers"},
    }
    summaries = [run(jsonl, tokenizer_folder, tmp_path / name, **options) for name, options in ways.items()]
    assert {(done.documents, done.tokens) for done in summaries} == {(400, summaries[0].tokens)}
    for suffix in (".bin", ".idx"):
        assert len({(tmp_path / f"{name}{suffix}").read_bytes() for name in ways}) == 1
    tokenizer, reader = Tokenizer.load(tokenizer_folder), IndexedReader(tmp_path / "4")
    begins = [0, *reader.document_ends(0, reader.n_tokens), reader.n_tokens]
    found = [reader.tokens(a, b).tolist() for a, b in zip(begins, begins[1:], strict=False)]
    assert found == [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(corpus)]
    assert sorted(path.name for path in tmp_path.glob("*.parts")) == []


def test_megatron_reads_it_and_the_sidecar_tells(tmp_path, jsonl, corpus, tokenizer_folder):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    jsonl.write_text(jsonl.read_text() + '{"text": ""}\n{"text": 5}\n')
    done = run(jsonl, tokenizer_folder, tmp_path / "d", skip_bad=True, command=["mlmclm", "preprocess"])
    dataset, tokenizer = IndexedDataset(f"{tmp_path}/d"), Tokenizer.load(tokenizer_folder)
    assert len(dataset) == len(corpus) == done.documents
    assert tokenizer.decode(dataset[7]) == corpus[7] + "[EOS]"
    assert json.loads((tmp_path / "d.json").read_text()) == {
        "version": 1,
        "tokenizer": str(tokenizer_folder),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": 320,
        "eos_id": 3,
        "dtype": "uint16",
        "documents": len(corpus),
        "tokens": done.tokens,
        "skipped": 1,
        "bad": 1,
        "sources": [str(jsonl)],
        "command": ["mlmclm", "preprocess"],
    }


def test_several_text_keys(tmp_path, tokenizer_folder):
    """Each key has data of its own; a record that lacks one of them is bad for all."""
    records = [{"title": f"t{i}", "body": f"body {i}"} for i in range(50)]
    records[20] = {"title": "alone"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = Options(text_keys=("title", "body"), skip_bad=True, shard_bytes=300)
    done = preprocess([f"{tmp_path}/a.jsonl"], str(tokenizer_folder), f"{tmp_path}/d", options)
    assert [(each.prefix, each.documents, each.bad) for each in done] == [
        (f"{tmp_path}/d_title", 49, 1),
        (f"{tmp_path}/d_body", 49, 1),
    ]
    tokenizer, reader = Tokenizer.load(tokenizer_folder), IndexedReader(tmp_path / "d_body")
    assert tokenizer.decode(reader.tokens(0, reader.n_tokens)).split("[EOS]")[18:22] == [
        *("body 18", "body 19", "body 21", "body 22")
    ]


def test_forms_mix(tmp_path, corpus, tokenizer_folder, jsonl):
    """The same documents from a compressed file, a table and standard input."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = run(jsonl, tokenizer_folder, tmp_path / "d")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    pq.write_table(pa.table({"text": corpus}), tmp_path / "a.parquet", row_group_size=30)
    for name in ("a.jsonl.gz", "a.parquet"):
        assert run(tmp_path / name, tokenizer_folder, tmp_path / name).tokens == expected.tokens
        assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / "d.bin").read_bytes()
    arguments = ("preprocess", "-", "--tokenizer", tokenizer_folder, "--output", tmp_path / "s", "--workers", 2)
    done = mlmclm(*arguments, input=jsonl.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "s.bin").read_bytes() == (tmp_path / "d.bin").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_stays(tmp_path, jsonl, tokenizer_folder, workers):
    jsonl.write_text(jsonl.read_text() + '{"body": "x"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:401: no key 'text'; its keys are: 'body'"):
        run(jsonl, tokenizer_folder, tmp_path / "out" / "d", workers=workers, shard_bytes=1 << 20)
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_records_left_out_are_counted_and_named(tmp_path, jsonl, tokenizer_folder):
    lines = jsonl.read_text().splitlines()
    lines[5] = lines[300] = '{"text": null}'
    jsonl.write_text("\n".join(lines))
    arguments = ("preprocess", jsonl, "--tokenizer", tokenizer_folder, "--output", tmp_path / "d", "--on-error", "skip")
    done = mlmclm(*arguments, "--shard-mb", 0.005)
    assert (done.returncode, done.stderr) == (0, "")
    left_out = [line.split("in/")[1] for line in done.stdout.splitlines()[:-1]]
    assert left_out == [f"a.jsonl:{n}: the value of 'text' is null, not a string" for n in (6, 301)]
    assert "398 documents (0 empty, 2 bad left out)" in done.stdout
    again = mlmclm(*arguments[:-2], "--overwrite")  # the marker's bad records do not pass for none
    assert again.returncode == 2 and "a.jsonl:6: " in again.stderr


def test_refusals(tmp_path, jsonl, tokenizer_folder):
    run(jsonl, tokenizer_folder, tmp_path / "d")
    with pytest.raises(UserError, match="d.bin: exists already; add --overwrite"):
        run(jsonl, tokenizer_folder, tmp_path / "d")
    run(jsonl, tokenizer_folder, tmp_path / "d", overwrite=True)
    for options, message in (
        ({"workers": 0}, "--workers 0"),
        ({"text_keys": ("text", "text")}, "names a key twice"),
        ({"ray_address": "x"}, "--ray-address: is for --engine ray"),
    ):
        with pytest.raises(UserError, match=message):
            run(jsonl, tokenizer_folder, tmp_path / "e", **options)
    for content, message in ((" \n\n", "every line is blank"), ('{"text": ""}\n', "1 are empty, 0 bad")):
        jsonl.write_text(content)
        with pytest.raises(UserError, match=f"a.jsonl: no document to write to .*e: {message}"):
            run(jsonl, tokenizer_folder, tmp_path / "e")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx", "d.json", "in"]


def test_tokenizer_without_eos(tmp_path, jsonl, tokenizer_folder):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="names no EOS.* set eos_token in its tokenizer_config.json"):
        run(jsonl, tmp_path / "t", tmp_path / "d")


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


def test_command_line(tmp_path, jsonl, corpus):
    """The three verbs as a user calls them; one line for a mistake, exit status 2."""
    made = mlmclm("tokenizer", "train", jsonl, "--vocab-size", 300, "--output", tmp_path / "t")
    assert (made.returncode, made.stderr) == (0, "") and "300 pieces, from 400 documents" in made.stdout
    done = mlmclm("preprocess", jsonl.parent, "--tokenizer", tmp_path / "t", "--output", tmp_path / "d", "--workers", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.count("\n") == 1
        and "400 documents (0 empty, 0 bad left out), " in done.stdout
        and "uint16" in done.stdout
    )
    seen = mlmclm("inspect", tmp_path / "d", "--deep")
    assert (seen.returncode, seen.stderr) == (0, "") and "100.00% of documents" in seen.stdout
    (tmp_path / "d.bin").write_bytes((tmp_path / "d.bin").read_bytes()[:-2])
    cut = mlmclm("inspect", tmp_path / "d")
    assert cut.returncode == 2 and cut.stdout == "" and cut.stderr.count("\n") == 1 and "d.bin: " in cut.stderr


@pytest.fixture
def long_run(tmp_path, tokenizer_folder):
    """A command in the midst of its work, writing to OUT/d with two workers; slow enough to be caught."""
    (tmp_path / "a.txt").write_bytes(b"some words to tokenize, a great many of them\n" * 400_000)
    command = [sys.executable, "-m", "megatron_mlmclm.cli", "preprocess", tmp_path / "a.txt", "--tokenizer"]
    options = ["--workers", "2", "--tokenize-with", "tokenizers", "--shard-mb", "0.2"]
    command = [*command, tokenizer_folder, "--output", tmp_path / "out" / "d", *options]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(worker_pids(run.pid)) == 2)
        wait_for(lambda: len(list((tmp_path / "out").glob("d.parts/*.json"))) > 3)
        yield run
    finally:
        run.kill()
        run.wait()


@linux
def test_sigterm_leaves_whole_shards_alone(tmp_path, long_run):
    workers = worker_pids(long_run.pid)
    long_run.terminate()
    assert long_run.wait(60) == 143
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["d.parts"]
    wait_for(lambda: not any(map(is_running, workers)))


@linux
def test_workers_leave_with_a_killed_parent(long_run):
    workers = worker_pids(long_run.pid)
    long_run.kill()
    wait_for(lambda: not any(map(is_running, workers)))


@linux
def test_a_killed_worker_ends_the_run_with_an_error(tmp_path, long_run):
    os.kill(worker_pids(long_run.pid)[0], signal.SIGKILL)
    assert long_run.wait(60) == 2
    (line,) = long_run.stderr.read().splitlines()
    assert "a worker process was killed" in line and "the same command goes on" in line


@linux
def test_a_second_run_on_one_prefix_is_refused(tmp_path, long_run, jsonl, tokenizer_folder):
    with pytest.raises(UserError, match="d.parts: another run is writing there"):
        run(jsonl, tokenizer_folder, tmp_path / "out" / "d")
    assert long_run.poll() is None
