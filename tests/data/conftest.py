"""A small corpus and the tokenizer trained on it, made once."""

import pytest

from megatron_mlmclm.data.tokenizer_make import train_bpe


def documents(count: int) -> list[str]:
    """Documents of 3 to 60 words, each different, with letters beyond ASCII."""
    words = "the encoder läßt every token see naïve others 東京 so it may predict what was hidden,"
    words = words.split()
    return [" ".join(words[(i * 7 + j * j) % len(words)] + str(j % 5) for j in range(3 + i % 58)) for i in range(count)]


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return documents(400)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    assert train_bpe(iter(corpus), 320, folder) == 320
    return folder
