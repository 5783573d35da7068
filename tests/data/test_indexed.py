"""Our reader and writer against Megatron's, byte for byte; cut and foreign files; positions of documents."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mlmclm.data import IndexedReader, IndexedWriter
from megatron_mlmclm.data.indexed import best_dtype
from megatron_mlmclm.errors import UserError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [1, 2]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


def write_with_megatron(prefix, documents, dtype):
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for ids in sequences:
            builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_bytes_equal_megatrons(tmp_path, dtype):
    write(tmp_path / "ours", dtype=dtype)
    write_with_megatron(tmp_path / "theirs", [[ids] for ids in DOCUMENTS], dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_bulk_writes_the_same_bytes(tmp_path):
    write(tmp_path / "single")
    with IndexedWriter(tmp_path / "bulk", np.uint16) as writer:
        for part in (DOCUMENTS[:3], DOCUMENTS[3:]):
            writer.add_documents(np.concatenate(part), [len(ids) for ids in part])
        writer.add_documents(np.empty(0, np.uint16), [])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"bulk{suffix}").read_bytes() == (tmp_path / f"single{suffix}").read_bytes()


def test_megatron_reads_ours(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(write(tmp_path / "d")))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_reads_megatrons_with_several_sequences_and_empty_documents(tmp_path):
    write_with_megatron(tmp_path / "d", [[[1, 2], [3]], [], [[4, 5, 6]], [[7]], []], np.int32)
    reader = IndexedReader(tmp_path / "d")
    assert (reader.n_documents, reader.n_sequences, reader.n_tokens, reader.dtype) == (5, 4, 7, np.int32)
    assert reader.document_ends(0, 7).tolist() == [3, 6]  # 7 is the end of the stream, no document begins there
    assert reader.document_lengths().tolist() == [3, 0, 3, 1, 0]
    assert reader.tokens(0, 7).tolist() == [1, 2, 3, 4, 5, 6, 7]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.data())
@settings(max_examples=40, deadline=None)
def test_document_ends_lie_strictly_inside(tmp_path_factory, lengths, data):
    prefix = write(tmp_path_factory.mktemp("ends") / "d", [list(range(n)) for n in lengths])
    reader = IndexedReader(prefix)
    total = sum(lengths)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    begins = np.cumsum(lengths)[:-1]
    assert reader.document_ends(start, stop).tolist() == [b for b in begins if start < b < stop]
    assert reader.tokens(start, stop).tolist() == [i for n in lengths for i in range(n)][start:stop]
    assert reader.lengths.tolist() == reader.document_lengths().tolist() == lengths


def test_arrays_are_copies_and_outlive_the_reader(tmp_path):
    reader = IndexedReader(write(tmp_path / "d", dtype=np.int32))
    tokens, ends, lengths = reader.tokens(0, 10), reader.document_ends(0, 10), reader.lengths
    del reader
    tokens[0] = 99
    ends[0] = 99
    assert (tokens.dtype, ends.dtype, lengths.tolist()) == (np.int64, np.int64, [3, 1, 4, 2])
    assert IndexedReader(tmp_path / "d").tokens(0, 1).tolist() == [5]
    with pytest.raises(IndexError):
        IndexedReader(tmp_path / "d").tokens(0, 11)
    with pytest.raises(IndexError):
        IndexedReader(tmp_path / "d").document_ends(3, 2)


def sum_of(reader) -> int:
    return int(reader.tokens(0, len(reader)).sum())


def test_pickles_into_a_spawned_process(tmp_path):
    reader = IndexedReader(write(tmp_path / "d"))
    assert pickle.loads(pickle.dumps(reader)).tokens(0, 3).tolist() == [5, 6, 7]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(sum_of, reader).result(60) == sum_of(reader)


def test_prefix_may_carry_its_suffix(tmp_path):
    write(tmp_path / "d.v1")
    assert IndexedReader(tmp_path / "d.v1.idx").n_tokens == IndexedReader(f"{tmp_path}/d.v1.bin").n_tokens == 10


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("keep", [0, 1, 33, 34, -1, -8])
def test_cut_files_are_refused_at_open(tmp_path, suffix, keep):
    write(tmp_path / "d", [[1] * 50, [2] * 30])
    path = tmp_path / f"d{suffix}"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=rf"d\{suffix}: "):
        IndexedReader(tmp_path / "d")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_longer_and_missing_files_are_refused(tmp_path, suffix):
    write(tmp_path / "d")
    path = tmp_path / f"d{suffix}"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(UserError, match=f"{size + 8} bytes.* {size}"):
        IndexedReader(tmp_path / "d")
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        IndexedReader(tmp_path / "d")


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"PK", "not Megatron indexed data"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "dtype code 7"),
        (17, b"\x63", "dtype code 99"),
        (18, bytes(8), "holds no document"),
        (34 + 16, b"\x02", "first pointer is 2"),
        (34 + 48, b"\x01", "documents run from sequence 1"),
        (34 + 48 + 32, b"\x03", "to 3,"),
    ],
)
def test_damaged_index_is_refused(tmp_path, offset, content, message):
    write(tmp_path / "d")
    path = tmp_path / "d.idx"
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)
    with pytest.raises(UserError, match=message):
        IndexedReader(tmp_path / "d")


@pytest.mark.parametrize(
    ("offset", "message"), [(34, "sequence 1 is"), (34 + 16 + 16, "sequence 2 is"), (34 + 56, "order")]
)
@pytest.mark.parametrize("stretch", [1, 3, 100])
def test_verify_finds_damage_inside(tmp_path, monkeypatch, offset, message, stretch):
    monkeypatch.setattr("megatron_mlmclm.data.indexed.STRETCH", stretch)
    IndexedReader(write(tmp_path / "d")).verify()
    path = tmp_path / "d.idx"
    whole = bytearray(path.read_bytes())
    whole[offset] = 9
    path.write_bytes(whole)
    with pytest.raises(UserError, match=message):
        IndexedReader(tmp_path / "d").verify()


@pytest.mark.parametrize(("ids", "dtype"), [([1, 65536], np.uint16), ([3, -1], np.int32), ([2**31], np.int32)])
def test_ids_that_do_not_fit_leave_nothing_behind(tmp_path, ids, dtype):
    with pytest.raises(UserError, match="does not fit"):
        write(tmp_path / "d", [[1, 2], ids], dtype)
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_older_data(tmp_path):
    write(tmp_path / "d")
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "d", np.int32) as writer:
        writer.add_document([1])
        raise KeyboardInterrupt
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    assert IndexedReader(tmp_path / "d").n_tokens == 10


def test_writer_refuses_nonsense(tmp_path):
    with pytest.raises(UserError, match="no document"):
        write(tmp_path / "d", [])
    with pytest.raises(UserError, match="cannot write"), IndexedWriter("/proc/none/d", np.uint16):
        pass
    for ids, lengths in (([1, 2], [1]), ([1, 2], [2, 0]), (np.array([1.0]), [1])):
        with pytest.raises(ValueError), IndexedWriter(tmp_path / "d", np.uint16) as writer:
            writer.add_documents(np.asarray(ids), lengths)


def test_best_dtype_is_megatrons():
    from megatron.core.datasets.indexed_dataset import DType

    for size in (1, 65499, 65500, 65536, 128256):
        assert best_dtype(size) == np.dtype(DType.optimal_dtype(size))
