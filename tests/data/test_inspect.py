import argparse
import json

import numpy as np
import pytest

from megatron_mlmclm.data import IndexedWriter
from megatron_mlmclm.data.inspect import add_arguments, run
from megatron_mlmclm.errors import UserError


def inspect(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args([str(a) for a in arguments]))


@pytest.fixture
def prefix(tmp_path):
    with IndexedWriter(tmp_path / "d", np.int32) as writer:
        for ids in ([5, 6, 2], [7, 2], [9, 9, 9, 9]):
            writer.add_document(ids)
    return tmp_path / "d"


def sidecar(prefix, **changes):
    known = {
        "tokens": 9,
        "documents": 3,
        "dtype": "int32",
        "eos_id": 2,
        "vocab_size": 10,
        "tokenizer_fingerprint": "f0",
    }
    prefix.with_suffix(".json").write_text(json.dumps(known | changes))


def test_without_a_sidecar(prefix, capsys):
    inspect(prefix, "--deep")
    printed = capsys.readouterr().out
    assert "documents   3\ntokens      9\ndtype       int32\n" in printed
    assert "shortest 2, mean 3.0, longest 4 tokens" in printed
    assert "unknown" in printed and "largest id  9" in printed and "end in EOS" not in printed


@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
def test_deep_counts_endings_over_any_chunk(prefix, capsys, monkeypatch, chunk):
    monkeypatch.setattr("megatron_mlmclm.data.inspect.CHUNK_TOKENS", chunk)
    sidecar(prefix)
    inspect(prefix, "--deep")
    assert "end in EOS  66.67% of documents" in capsys.readouterr().out


def test_sidecar_of_other_data(prefix):
    sidecar(prefix, tokens=10)
    with pytest.raises(UserError, match="d.json: says tokens 10, the data has 9"):
        inspect(prefix)
    prefix.with_suffix(".json").write_text("{")
    with pytest.raises(UserError, match="d.json: not JSON"):
        inspect(prefix)


def test_id_beyond_the_vocabulary(prefix):
    sidecar(prefix, vocab_size=9)
    with pytest.raises(UserError, match="holds id 9, outside the vocabulary"):
        inspect(prefix, "--deep")
