"""Shards: what is made is not made again, a run killed at random goes on, slices of other machines join to the same."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_mlmclm.data.preprocess import Options, preprocess
from megatron_mlmclm.data.shards import Job, Made, Shard, ShardMaker, locked, plan_shards
from megatron_mlmclm.data.sources import find_sources
from megatron_mlmclm.data.text import Slice
from megatron_mlmclm.data.tokenizer import Tokenizer
from megatron_mlmclm.data.workers import in_order
from megatron_mlmclm.errors import UserError

SMALL = 2000  # bytes a shard


@pytest.fixture
def text(tmp_path, corpus):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{document}\n" for document in corpus))
    return path


@pytest.fixture
def expected(tmp_path, text, tokenizer_folder):
    preprocess([str(text)], str(tokenizer_folder), f"{tmp_path}/expected")
    return lambda prefix: all(
        Path(f"{prefix}{suffix}").read_bytes() == (tmp_path / f"expected{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    )


def job(tmp_path, tokenizer_folder, **options) -> Job:
    fingerprint = Tokenizer.load(tokenizer_folder).fingerprint
    return Job(str(tokenizer_folder), fingerprint, "tokenizers", str(tmp_path / "d.parts"), **options)


def test_slices_of_other_machines_join_to_the_same(tmp_path, text, tokenizer_folder, expected):
    said = []
    for rank in (2, 0, 1):
        options = Options(shard_bytes=SMALL, slice=(rank, 3))
        assert preprocess([str(text)], str(tokenizer_folder), f"{tmp_path}/d", options, said.append) == []
        assert not (tmp_path / "d.bin").exists()
    assert "slice 2 of 3: " in said[0]
    options = Options(shard_bytes=SMALL, engine="local", workers=7)
    preprocess([str(text)], str(tokenizer_folder), f"{tmp_path}/d", options, said.append)
    assert said[3:] == []  # nothing was left to make
    assert expected(tmp_path / "d") and not (tmp_path / "d.parts").exists()


def test_only_what_is_missing_is_made(tmp_path, text, tokenizer_folder, expected, monkeypatch):
    preprocess([str(text)], str(tokenizer_folder), f"{tmp_path}/d", Options(shard_bytes=SMALL, slice=(0, 2)))
    parts = tmp_path / "d.parts"
    made = {path: path.stat().st_mtime_ns for path in parts.glob("*.bin")}
    (parts / ".x.bin.1-ab.part").write_text("what a killed run left")
    said, seen = [], []
    maker = ShardMaker.__call__
    monkeypatch.setattr(ShardMaker, "__call__", lambda self, shard: seen.append(shard) or maker(self, shard))
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr("megatron_mlmclm.data.preprocess._join", _interrupt)
        preprocess([str(text)], str(tokenizer_folder), f"{tmp_path}/d", Options(shard_bytes=SMALL), said.append)
    assert all(path.stat().st_mtime_ns == written for path, written in made.items())
    assert not list(parts.glob(".*"))
    whole = len(list(parts.glob("*.json")))
    assert len(seen) == whole - len(made)
    assert said == [f"{parts}: {len(made)} of {whole} shards are made already; making the others"]
    preprocess([str(text)], str(tokenizer_folder), f"{tmp_path}/d", Options(shard_bytes=SMALL), said.append)
    assert expected(tmp_path / "d") and len(seen) == whole - len(made)


def _interrupt(*_):
    raise KeyboardInterrupt


def test_other_text_or_settings_are_other_shards(tmp_path, text, tokenizer_folder):
    def names(**options):
        return {
            shard.name for shard in plan_shards(find_sources([text]), job(tmp_path, tokenizer_folder, **options), SMALL)
        }

    first = names()
    assert first == names() and len(first) > 3
    from megatron_mlmclm.data.text import Reading

    assert not first & names(reading=Reading(("body",)))
    text.write_text(text.read_text() + "more\n")
    assert not first & names()


def test_an_empty_shard_has_a_marker_alone(tmp_path, tokenizer_folder):
    (tmp_path / "a.txt").write_text("\n" * 100)
    this = job(tmp_path, tokenizer_folder)
    (shard,) = plan_shards(find_sources([tmp_path / "a.txt"]), this, SMALL)
    assert ShardMaker(this)(shard) == Made([0], [0], [0], 0, [])
    assert [path.name for path in (tmp_path / "d.parts").iterdir()] == [f"{shard.name}.json"]


def test_a_tokenizer_that_changes_meanwhile_is_refused(tmp_path, tokenizer_folder):
    this = Job(str(tokenizer_folder), "another", "tokenizers", str(tmp_path))
    with pytest.raises(UserError, match="changed since the run began"):
        ShardMaker(this)


def test_locks(tmp_path):
    parts = tmp_path / "d.parts"
    with locked(parts, shared=True), locked(parts, shared=True):
        with pytest.raises(UserError, match="another run is writing there"), locked(parts):
            pass
        (parts / "s.json").write_text("{}")
    with locked(parts), pytest.raises(UserError, match="another run"), locked(parts, shared=True):
        pass
    (parts / "s.json").unlink()
    with locked(parts):
        pass
    assert not parts.exists()


def test_a_folder_that_cannot_be_written(tokenizer_folder, text):
    with pytest.raises(UserError, match="/proc/none/d.parts: cannot write"):
        preprocess([str(text)], str(tokenizer_folder), "/proc/none/d")


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, tokenizer_folder, text, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_mlmclm.data.indexed.commit", full)
    with pytest.raises(UserError, match="bin: cannot write: No space left on device"):
        preprocess([str(text)], str(tokenizer_folder), f"{tmp_path}/d")
    assert not list(tmp_path.glob("d*"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ends a process group")
def test_killed_three_times_and_restarted(tmp_path, tokenizer_folder, corpus):
    """SIGKILL to the whole run at random moments, of its work or of its joining; the end is that of an unbroken run."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{document} {i}\n" for i in range(60) for document in corpus))
    preprocess([str(path)], str(tokenizer_folder), f"{tmp_path}/one")
    command = [sys.executable, "-m", "megatron_mlmclm.cli", "preprocess", str(path), "--tokenizer", tokenizer_folder]
    options = ["--output", tmp_path / "d", "--workers", "2", "--shard-mb", "0.02", "--tokenize-with", "tokenizers"]
    chance, counts = random.Random(5), []
    for _ in range(3):
        before = len(list(tmp_path.glob("d.parts/*.json")))
        run = subprocess.Popen([*command, *options], start_new_session=True)
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("d.parts/*.json"))) < before + 2 and run.poll() is None:
            assert time.monotonic() < until
        time.sleep(chance.random() * 0.1)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        counts.append(len(list(tmp_path.glob("d.parts/*.json"))))
    assert counts == sorted(counts) and counts[0] > 0
    subprocess.run([*command, *options], check=True, timeout=120)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"d{suffix}").read_bytes() == (tmp_path / f"one{suffix}").read_bytes()
    assert not (tmp_path / "d.parts").exists()


def test_the_planner_does_not_run_ahead(tmp_path, tokenizer_folder, text):
    """At most two shards per worker are under way."""
    this, asked = job(tmp_path, tokenizer_folder), 0
    shards = plan_shards(find_sources([text]), this, 500)

    def counted():
        nonlocal asked
        for shard in shards:
            asked += 1
            yield shard

    for done, _ in enumerate(in_order(ShardMaker, (this,), counted(), 2), 1):
        assert asked - done <= 4
    assert done == len(shards) > 10


def test_parquet_is_cut_at_row_groups(tmp_path, corpus, tokenizer_folder):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": corpus}), tmp_path / "a.parquet", row_group_size=100)
    this = job(tmp_path, tokenizer_folder)
    shards: list[Shard] = plan_shards(find_sources([tmp_path / "a.parquet"]), this, 1000)
    assert [(shard.part.begin, shard.part.end) for shard in shards] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert isinstance(shards[0].part, Slice)
