"""What the inputs name: files, folders, globs, lists, URLs, compressed or not; what is cut is said to be."""

import bz2
import functools
import gzip
import http.server
import lzma
import threading

import pytest

from megatron_mlmclm.data.sources import find_sources
from megatron_mlmclm.data.text import iter_documents
from megatron_mlmclm.errors import UserError

LINES = [f"line {i} of some words" for i in range(3000)]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


def zst(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.compress(content, "zstd", asbytes=True)


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zst}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_and_cut(tmp_path, suffix):
    path = tmp_path / f"a.txt.{suffix}"
    whole = PACK[suffix](TEXT)
    path.write_bytes(whole)
    assert list(iter_documents(find_sources([path]))) == LINES
    path.write_bytes(PACK[suffix](TEXT[:500]) + PACK[suffix](TEXT[500:]))  # as `cat` joins them
    assert list(iter_documents(find_sources([path]))) == LINES
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"a.txt.{suffix}: "):
        list(iter_documents(find_sources([path])))
    path.write_bytes(b"this is not compressed at all, whatever its name says")
    with pytest.raises(UserError, match=rf"a.txt.{suffix}: "):
        list(iter_documents(find_sources([path])))


def test_compressed_tables(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"text": LINES})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert list(iter_documents(find_sources([tmp_path / "a.parquet.gz"]))) == LINES


def test_files_folders_globs_lists(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.jsonl.gz", "sub/d.csv", ".hidden.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")

    def names(*inputs):
        return [
            source.path.removeprefix(f"{tmp_path}/") for source in find_sources([f"{tmp_path}/{i}" for i in inputs])
        ]

    assert names("") == ["a.jsonl", "b.txt", "sub/c.jsonl.gz"]
    assert names("b.txt", "a.jsonl") == ["b.txt", "a.jsonl"]
    assert names("**/*.jsonl*") == ["a.jsonl", "sub/c.jsonl.gz"]
    (tmp_path / "x[1].txt").write_text("x\n")
    assert names("x[1].txt") == ["x[1].txt"]
    (tmp_path / "list").write_text(f"{tmp_path}/b.txt\n\n  {tmp_path}/a.jsonl\n")
    assert [s.path for s in find_sources([f"@{tmp_path}/list"])] == [f"{tmp_path}/b.txt", f"{tmp_path}/a.jsonl"]
    assert [(s.form, s.packed) for s in find_sources([tmp_path / "sub" / "d.csv"], "txt")] == [("txt", "")]
    (only,) = find_sources([tmp_path / "sub" / "c.jsonl.gz"])
    assert (only.form, only.packed, only.size) == ("jsonl", "gz", 2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["none.txt"], "none.txt: no such file or folder"),
        (["*.jsonl"], "matches no .jsonl, .txt, .parquet or .arrow file"),
        (["empty"], "empty: a folder without"),
        (["a.csv"], "a.csv: is not a .jsonl, .txt, .parquet .*--format"),
        (["a.txt", "./*.txt"], "a.txt: named twice"),
        (["@nolist"], "nolist: cannot read this list"),
        (["nosuch://b/a.txt"], "nosuch://b/a.txt: .*nosuch"),
        ([], "no input"),
    ],
)
def test_bad_inputs_are_named(tmp_path, monkeypatch, inputs, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=message):
        find_sources(inputs)


@pytest.fixture
def server(tmp_path):
    """Files of a folder over HTTP, from this machine."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_urls(tmp_path, server):
    pytest.importorskip("aiohttp")
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(TEXT))
    found = find_sources([f"{server}/a.txt", f"{server}/b.txt.gz?token=1"])
    assert [(source.form, source.packed) for source in found] == [("txt", ""), ("txt", "gz")]
    assert list(iter_documents(found)) == LINES * 2
    with pytest.raises(UserError, match="c.txt: no such file"):
        find_sources([f"{server}/c.txt"])


def test_globs_of_a_file_system(tmp_path):
    """fsspec's own local file system stands for a bucket."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_bytes(TEXT[: 23 * 10])
    (tmp_path / "x.csv").write_text("no")
    for url in (f"file://{tmp_path}/*.txt", f"file://{tmp_path}"):
        found = find_sources([url])
        assert [source.path for source in found] == [f"file://{tmp_path}/a.txt", f"file://{tmp_path}/b.txt"]
    with pytest.raises(UserError, match="matches no .jsonl"):
        find_sources([f"file://{tmp_path}/*.jsonl"])
