"""Indexed data sets into one: the bytes Megatron's builder would write, and what cannot be merged is told."""

import json

import numpy as np
import pytest

from megatron_mlmclm.data import IndexedReader
from megatron_mlmclm.data.indexed import IndexedWriter
from megatron_mlmclm.data.merge import merge
from megatron_mlmclm.data.preprocess import preprocess
from megatron_mlmclm.errors import UserError


def write(prefix, documents, dtype=np.uint16, **sidecar):
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add_document(ids)
    if sidecar:
        prefix.with_name(prefix.name + ".json").write_text(json.dumps(sidecar))
    return prefix


def test_as_megatrons_builder_merges(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    first, second = write(tmp_path / "a", [[1, 2], [3]]), write(tmp_path / "b", [[4, 5, 6]])
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:  # documents of several sequences, and of none
        writer.add_documents(np.arange(6), [1, 2, 3], [2, 0, 1])
    prefixes = [first, tmp_path / "c", second]
    merged = merge(prefixes, tmp_path / "all")
    assert (merged.n_documents, merged.n_tokens) == (6, 12)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert not (tmp_path / "all.json").exists()


def test_the_sidecar_sums_up(tmp_path, corpus, tokenizer_folder):
    for name, some in (("a", corpus[:100]), ("b", corpus[100:])):
        (tmp_path / f"{name}.txt").write_text("".join(f"{text}\n" for text in some))
        preprocess([f"{tmp_path}/{name}.txt"], str(tokenizer_folder), f"{tmp_path}/{name}")
    (tmp_path / "both.txt").write_text("".join(f"{text}\n" for text in corpus))
    (whole,) = preprocess([f"{tmp_path}/both.txt"], str(tokenizer_folder), f"{tmp_path}/whole")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    found, expected = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("all", "whole"))
    assert found["sources"] == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert {**found, "sources": 0, "command": 0} == {**expected, "sources": 0, "command": 0}
    assert (tmp_path / "all.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert IndexedReader(tmp_path / "all").n_tokens == whole.tokens


def test_what_cannot_be_merged(tmp_path):
    a = write(tmp_path / "a", [[1]], tokenizer_fingerprint="one", tokenizer="first/tokenizer")
    other = write(tmp_path / "other", [[1]], tokenizer_fingerprint="two", tokenizer="second/tokenizer")
    wide = write(tmp_path / "wide", [[1]], np.int32)
    for prefixes, output, message in (
        ([a, wide], "all", "wide: holds int32, .*a holds uint16: .* preprocess both with one tokenizer"),
        ([a, other], "all", "other: its tokenizer .second/tokenizer. is not that of .*a .first/tokenizer."),
        ([a, write(tmp_path / "b", [[2]])], "b", "b: is one of the data sets to merge; name another --output"),
        ([a, tmp_path / "none"], "all", "none.idx: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            merge(prefixes, tmp_path / output)
    assert not list(tmp_path.glob("all*"))


def test_the_verb(tmp_path, capsys):
    from megatron_mlmclm.cli import dispatch

    write(tmp_path / "a", [[1, 2], [3]])
    command = ["merge-data", f"{tmp_path}/a", f"{tmp_path}/a", "--output", f"{tmp_path}/b"]
    dispatch(command)
    assert capsys.readouterr().out == f"{tmp_path}/b: 4 documents, 6 tokens, uint16, from 2 data sets\n"
    with pytest.raises(UserError, match="b.bin: exists already; add --overwrite"):
        dispatch(command)
    dispatch([*command, "--overwrite"])
