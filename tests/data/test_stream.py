import numpy as np
import pytest

from megatron_mlmclm.data import IndexedWriter, TokenStream
from megatron_mlmclm.errors import UserError


def write(prefix, documents):
    with IndexedWriter(prefix, np.uint16) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


def test_samples_share_one_token_and_cover_the_stream(tmp_path):
    stream = TokenStream(write(tmp_path / "d", [range(7), range(7, 9), range(9, 14)]), 4)
    assert [stream.sample(i).tolist() for i in range(len(stream))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
    ]
    assert [stream.document_starts(i).tolist() for i in range(3)] == [[], [3], [1]]
    with pytest.raises(IndexError):
        stream.sample(3)


@pytest.mark.parametrize(("tokens", "samples"), [(5, 1), (8, 1), (9, 2)])
def test_number_of_samples(tmp_path, tokens, samples):
    assert TokenStream(write(tmp_path / "d", [range(tokens)]), 4).n_samples == samples


def test_sequence_longer_than_the_data(tmp_path):
    write(tmp_path / "d", [range(4)])
    with pytest.raises(UserError, match="holds 4 tokens.* needs 5"):
        TokenStream(tmp_path / "d", 4)
    with pytest.raises(UserError, match="sequence length 0"):
        TokenStream(tmp_path / "d", 0)


def test_fingerprint_names_the_data_only(tmp_path):
    first = TokenStream(write(tmp_path / "a", [[1, 2, 3], [4, 5]]), 2)
    assert first.fingerprint == TokenStream(write(tmp_path / "b", [[1, 2, 3], [4, 5]]), 4).fingerprint
    others = [[[1, 2, 3], [4, 6]], [[0, 2, 3], [4, 5]], [[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]]]
    assert len({TokenStream(write(tmp_path / f"c{i}", d), 2).fingerprint for i, d in enumerate(others)}) == 4
    assert first.fingerprint not in {TokenStream(tmp_path / f"c{i}", 2).fingerprint for i in range(4)}
