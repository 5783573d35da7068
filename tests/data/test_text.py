"""Lines and rows to documents: every form, cut alike whatever reads it, bad records named by file and line."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.data.sources import Source, find_sources
from megatron_mlmclm.data.text import Reading, Slice, iter_documents, read_slice
from megatron_mlmclm.errors import UserError

PLAIN = Reading()


def source(path, form=None) -> Source:
    return find_sources([path], form)[0]


def read(path, content: bytes, key="text"):
    path.write_bytes(content)
    return list(iter_documents([source(path)], key))


def texts(part: Slice, reading=PLAIN, on_bad=None) -> list[str]:
    batches = read_slice(part, reading, on_bad) if on_bad else read_slice(part, reading)
    return [text for batch in batches for text in batch.texts[0]]


def test_jsonl_and_txt(tmp_path):
    lines = b'{"text": "one\\ntwo", "id": 1}\n\n  \r\n{"text": ""}\r\n{"text": "l\xc3\xa4st"}'
    assert read(tmp_path / "a.jsonl", lines) == ["one\ntwo", "", "läst"]
    assert read(tmp_path / "a.txt", b"\xef\xbb\xbfone \n\n \ntw\xc3\xb6\r\nthree") == ["one ", "twö", "three"]
    assert read(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"body": "x"}\n', "body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "a.jsonl:3: not JSON: "),
        (b"[1]", "a.jsonl:3: a JSON list, not an object"),
        (b'{"body": "x", "id": 2}', "a.jsonl:3: no key 'text'; its keys are: 'body', 'id' .*--text-key"),
        (b"{}", "a.jsonl:3: no key 'text'; its keys are: none"),
        (b'{"text": 5}', "a.jsonl:3: the value of 'text' is a int, not a string"),
        (b'{"text": null}', "a.jsonl:3: the value of 'text' is null, not a string"),
        (b'{"text": "\xe4"}', r"a.jsonl:3: byte 11 \(0xe4\) is not UTF-8"),
        (b'{"text": "\\ud800"}', "a.jsonl:3: not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    content = b'{"text": "x"}\n\n' + line + b'\n{"text": "y"}\n'
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.jsonl", content)
    bad = []
    assert texts(Slice(source(tmp_path / "a.jsonl")), on_bad=bad.append) == ["x", "y"]
    assert len(bad) == 1


def test_txt_that_is_not_utf8(tmp_path):
    with pytest.raises(UserError, match=r"a.txt:2: byte 2 \(0xff\) is not UTF-8"):
        read(tmp_path / "a.txt", b"fine\nx\xff\n")


@given(
    lines=st.lists(st.sampled_from(["", " ", "a", "bb bb", "ünï", "x" * 40, "bad"]), max_size=30),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    batch=st.integers(1, 60),
    ends=st.booleans(),
)
def test_slices_share_out_the_lines(tmp_path_factory, lines, cuts, batch, ends):
    """Any cuts and any batches: each document once, in order, and bad lines by their own numbers."""
    path = tmp_path_factory.mktemp("s") / "a.jsonl"
    written = [json.dumps({"text": line}) if line not in ("", " ", "bad") else line for line in lines]
    path.write_text("\n".join(written) + ("\n" if ends else ""))
    whole, size = source(path), path.stat().st_size
    edges = sorted({0, size, *(min(cut, size) for cut in cuts)})
    found, bad = [], []
    for begin, end in zip(edges, edges[1:], strict=False):
        found += texts(Slice(whole, begin, end), Reading(batch_bytes=batch), bad.append)
    assert found == [line for line in lines if line not in ("", " ", "bad")]
    numbers = [int(str(error).split("a.jsonl:")[1].split(":")[0]) for error in bad]
    assert numbers == [number for number, line in enumerate(lines, 1) if line == "bad"]


@pytest.mark.parametrize("batch", [10, 100, 5000])
def test_a_document_beyond_the_limit(tmp_path, batch):
    """It is a bad record, wherever it stands, and is passed over without being held."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n" + b"x" * 1000 + b"\ntwo\n" + b"y" * 101 + b"\n" + b"z" * 100 + b"\nthree\n" + b"w" * 500)
    reading, bad = Reading(max_document=100, batch_bytes=batch), []
    assert texts(Slice(source(path)), reading, bad.append) == ["one", "two", "z" * 100, "three"]
    assert [str(error).split(": ")[0].split("/")[-1] for error in bad] == ["a.txt:2", "a.txt:4", "a.txt:7"]
    with pytest.raises(UserError, match=r"a.txt:2: a document of more than .*--max-document-mb"):
        texts(Slice(source(path)), reading)


def test_memory_is_flat(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some words to read, again and again\n" * 600_000 + b"x" * 30_000_000)  # 51 MB
    reading = Reading(max_document=1 << 20, batch_bytes=1 << 18)
    tracemalloc.start()
    count = sum(len(batch.texts[0]) for batch in read_slice(Slice(source(path)), reading, lambda error: None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 600_000
    assert peak < 12e6


# Parquet and Arrow


@pytest.fixture
def rows():
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.table({"text": [f"döc {i}" for i in range(1000)], "n": range(1000)})


def test_parquet_by_row_groups(tmp_path, rows):
    import pyarrow.parquet as pq

    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=70)
    whole = source(tmp_path / "a.parquet")
    expected = rows.column("text").to_pylist()
    assert texts(Slice(whole)) == expected
    assert texts(Slice(whole, 0, 4)) + texts(Slice(whole, 4, 15)) == expected


def test_arrow_in_both_forms(tmp_path, rows):
    import pyarrow as pa

    for name, make in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink, make(sink, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=300)
        assert texts(Slice(source(tmp_path / f"{name}.arrow"))) == rows.column("text").to_pylist()


def test_a_folder_that_datasets_saved(tmp_path, rows):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(rows.to_pydict())
    made.save_to_disk(tmp_path / "d", num_shards=11)
    found = find_sources([tmp_path / "d"])
    assert len(found) == 11
    assert list(iter_documents(found)) == rows.column("text").to_pylist()
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "splits")
    with pytest.raises(UserError, match=r"splits: holds several splits; name those to read: .*train, .*test"):
        find_sources([tmp_path / "splits"])


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_bad_tables(tmp_path, form):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / f"a.{form}"

    def write(table):
        if form == "parquet":
            pq.write_table(table, path, row_group_size=3)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)

    write(pa.table({"body": ["x"], "n": [1]}))
    with pytest.raises(UserError, match=rf"a.{form}: no column 'text'; its columns are: 'body', 'n' .*--text-key"):
        texts(Slice(source(path)))
    write(pa.table({"text": [1, 2]}))
    with pytest.raises(UserError, match=rf"a.{form}: the column 'text' holds int64, not text"):
        texts(Slice(source(path)))
    write(pa.table({"text": ["a", "b", "c", "d", None, "f"]}))
    with pytest.raises(UserError, match=rf"a.{form}: row 5: the value of 'text' is null"):
        texts(Slice(source(path)))
    bad = []
    assert texts(Slice(source(path)), on_bad=bad.append) == ["a", "b", "c", "d", "f"]
    with pytest.raises(UserError, match=rf"a.{form}: row 5: a document of more than"):
        write(pa.table({"text": ["a", "b", "c", "d", "e" * 50]}))
        texts(Slice(source(path)), Reading(max_document=40))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=rf"a.{form}: cannot read: "):
        texts(Slice(source(path)))
