"""Any documents -> files -> indexed data -> the same documents; Megatron's IndexedDataset agrees."""

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mlmclm.data import IndexedReader, Tokenizer
from megatron_mlmclm.data.preprocess import Options, preprocess

# JSON text cannot hold lone surrogates in UTF-8.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def lossless(tmp_path_factory):
    """A tokenizer of bytes alone, which gives every text back letter for letter."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["[EOS]"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "[EOS]"}')
    return folder


def write(folder: Path, documents: list[str], form: str) -> Path:
    lines = "".join(json.dumps({"text": text}, ensure_ascii=len(documents) % 2 == 0) + "\n" for text in documents)
    path = folder / f"a.{form}"
    if form == "jsonl":
        path.write_text(lines, encoding="utf-8")
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": pa.array(documents, pa.string())}), path, row_group_size=2)
    return path


@settings(max_examples=60)
@given(st.lists(texts, min_size=1, max_size=12), st.sampled_from(["jsonl", "jsonl.gz", "parquet"]), st.data())
def test_documents_come_back(lossless, documents, form, data):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    filled = [text for text in documents if text]
    if "[EOS]" in "".join(documents) or not filled:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), documents, form)
        shard = data.draw(st.integers(1, 400))
        (done,) = preprocess([str(path)], str(lossless), f"{folder}/d", Options(shard_bytes=shard))
        assert (done.documents, done.skipped) == (len(filled), len(documents) - len(filled))
        reader, tokenizer = IndexedReader(f"{folder}/d"), Tokenizer.load(lossless)
        marks = reader.document_bounds(0, reader.n_documents)
        found = [reader.tokens(a, b) for a, b in zip(marks, marks[1:], strict=False)]
        assert [tokenizer.decode(ids) for ids in found] == [f"{text}[EOS]" for text in filled]
        theirs = IndexedDataset(f"{folder}/d")
        assert len(theirs) == len(found) and theirs.document_indices.tolist() == list(range(len(found) + 1))
        assert all(np.array_equal(theirs[n], ids) for n, ids in enumerate(found))
