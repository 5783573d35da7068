"""Planning: best-fit decreasing, and the plan file."""

import argparse
import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.data import IndexedReader, IndexedWriter, PackedStream
from megatron_mlmclm.data.fit import best_fit
from megatron_mlmclm.data.inspect import run as inspect
from megatron_mlmclm.data.pack import pack, pack_documents
from megatron_mlmclm.data.plan_file import find_plans, plan_path
from megatron_mlmclm.errors import UserError

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def write(prefix, lengths):
    with IndexedWriter(prefix, np.uint16) as writer:
        for number, length in enumerate(lengths):
            writer.add_document(np.arange(length) + 100 * number)
    return str(prefix)


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "d", [5, 20, 3, 8, 8, 1, 7])


def by_hand(sizes, capacity) -> list[int]:
    """Rooms of the bins, rising, piece after piece: the longest first, each where least room is left."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = bisect.bisect_left(rooms, size)
        room = rooms.pop(at) if at < len(rooms) else capacity
        bisect.insort(rooms, room - size)
    return rooms


@given(LENGTHS)
def test_best_fit_is_the_plain_algorithm(sizes):
    bins = best_fit(np.array(sizes), 60)
    filled = np.bincount(bins, weights=sizes).astype(int)
    assert sorted(60 - filled) == by_hand(sizes, 60)
    assert (filled > 0).all()


@given(LENGTHS, st.integers(1, 70))
def test_pieces_cover_each_token_once_and_fit(lengths, seq_length):
    bounds = 1000 + np.concatenate([[0], np.cumsum(lengths)])
    pieces, counts = pack_documents(bounds, seq_length)
    marks = np.cumsum(counts) - counts
    assert (np.add.reduceat(pieces[:, 1], marks) <= seq_length).all()
    covered = np.concatenate([np.arange(start, start + length) for start, length in pieces])
    assert sorted(covered) == list(range(bounds[0], bounds[-1]))
    begins = {int(start) for start in bounds[:-1]}
    for start, length in pieces.tolist():  # a piece is a document, or begins or goes on a longer one at whole lengths
        document = max(begin for begin in begins if begin <= start)
        end = min(bound for bound in bounds.tolist() if bound > start)
        assert (start - document) % seq_length == 0
        assert length == min(seq_length, end - start)


def test_plans_do_not_depend_on_windows_of_reading_but_on_data_alone(tmp_path, monkeypatch):
    lengths = [1 + 7 * i % 31 for i in range(50)]
    first, second = (write(tmp_path / name, lengths) for name in "ab")
    plans = [pack(prefix, 16).path.read_bytes() for prefix in (first, second, first)]
    assert len(set(plans)) == 1
    monkeypatch.setattr("megatron_mlmclm.data.pack.WINDOW", 7)
    plan = pack(first, 16)
    plan.verify()
    whole = [piece for index in range(plan.n_samples) for piece in plan.pieces(index)]
    assert sorted(i for start, length in whole for i in range(start, start + length)) == list(range(sum(lengths)))


def test_empty_documents_are_passed_over(tmp_path):
    """Megatron's own tools can write them; also at the end of the data."""
    prefix = write(tmp_path / "d", [3, 4])
    content = (tmp_path / "d.idx").read_bytes()
    header = content[:26] + (6).to_bytes(8, "little")
    marks = np.array([0, 0, 1, 2, 2, 2], "<i8").tobytes()
    (tmp_path / "d.idx").write_bytes(header + content[34 : 34 + 2 * 12] + marks)
    reader = IndexedReader(prefix)
    assert reader.n_documents == 5
    assert reader.document_bounds(0, 5).tolist() == [0, 0, 3, 7, 7, 7]
    assert reader.document_bounds(3, 5).tolist() == [7, 7, 7]
    assert reader.document_bounds(1, 2).tolist() == [0, 3]
    plan = pack(prefix, 8)
    assert [plan.pieces(index) for index in range(plan.n_samples)] == [[[0, 3], [3, 4]]]


def test_the_share_of_padding_is_told(prefix, capsys):
    stream = PackedStream(prefix, pack_verb(prefix, 10), 0)
    assert stream.padding == pytest.approx(1 - 52 / (10 * stream.n_samples))
    assert f"{stream.padding:.2%} padding" in capsys.readouterr().out
    inspect(argparse.Namespace(prefix=prefix, deep=False))
    assert f"packed      {stream.n_samples} samples of 10, {stream.padding:.2%} padding" in capsys.readouterr().out


def pack_verb(prefix: str, seq_length: int) -> int:
    from megatron_mlmclm.cli import dispatch

    dispatch(["pack", prefix, "--seq-length", str(seq_length)])
    return seq_length


def refused(prefix: str, seq_length: int = 10) -> str:
    with pytest.raises(UserError) as error:
        PackedStream(prefix, seq_length, 0)
    assert f"mlmclm pack {prefix} --seq-length {seq_length}" in str(error.value)
    return str(error.value)


def test_a_missing_plan_is_asked_for(prefix):
    assert "no such plan" in refused(prefix)
    pack(prefix, 12)
    pack(prefix, 8)
    assert "there is one for seq_length 8, 12" in refused(prefix)
    assert find_plans(prefix) == [8, 12]


def test_a_plan_for_another_length(prefix):
    pack(prefix, 12).path.rename(plan_path(prefix, 10))
    assert "is for seq_length 12, not 10" in refused(prefix)


def test_a_plan_of_other_data(prefix, tmp_path):
    pack(prefix, 10)
    write(tmp_path / "d", [5, 20, 3, 8, 8, 2, 6])
    assert "is of other data" in refused(prefix)
    with pytest.raises(UserError, match="is of other data"):
        inspect(argparse.Namespace(prefix=prefix, deep=False))
    assert PackedStream(prefix, pack_verb(prefix, 10), 0).n_samples == 6


@pytest.mark.parametrize(
    ("size", "words"), [(0, "empty"), (79, "shorter than its header"), (200, "promises"), (-1, "promises")]
)
def test_a_cut_plan(prefix, size, words):
    path = pack(prefix, 10).path
    path.write_bytes(path.read_bytes()[:size])
    assert words in refused(prefix)


def test_a_file_that_is_no_plan(prefix):
    path = pack(prefix, 10).path
    path.write_bytes(b"x" * 500)
    assert "not a plan of version 1" in refused(prefix)


@pytest.mark.parametrize(("table", "words"), [("pieces", "beyond 10 tokens"), ("marks", "out of order")])
def test_inspect_finds_damage_inside(prefix, table, words):
    path = pack(prefix, 10).path
    content = bytearray(path.read_bytes())
    at = 80 + 8 if table == "pieces" else len(content) - 16
    content[at : at + 8] = (11).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        inspect(argparse.Namespace(prefix=prefix, deep=False))


def test_nothing_is_left_of_a_plan_that_failed(prefix, tmp_path, monkeypatch):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="--seq-length 0: must be 1 or more"):
        pack(prefix, 0)

    def fail(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_mlmclm.data.pack.best_fit", fail)
    with pytest.raises(KeyboardInterrupt):
        pack(prefix, 10)
    assert sorted(tmp_path.iterdir()) == before
