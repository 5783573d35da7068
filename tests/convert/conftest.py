"""A tiny Llama in Hugging Face form, to convert or to spoil."""

import shutil
from pathlib import Path

import pytest

from tests.hf_models import make


@pytest.fixture(scope="session")
def whole_llama(corpus, tmp_path_factory) -> Path:
    """In several shards; nobody changes it."""
    return make("llama", tmp_path_factory.mktemp("hf") / "llama", corpus.tokenizer)


@pytest.fixture
def llama(whole_llama, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole_llama, tmp_path / "llama"))
