"""A user's mistake ends in one line on stderr and exit status 2, with nothing half-written (DESIGN, invariant 8)."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.errors import run_cleanly
from tests.conftest import ROOT

RECIPE = """
name: bad
output: run
model:
  {{num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2, seq_length: 64}}
data: {{tokenizer: {tokenizer}, train: {train}}}
batch: {{micro_batch_size: 2, global_batch_size: 4}}
phases: [{{objective: clm, steps: 2}}, {{objective: mlm, steps: 2, mask_ratio: 0.4}}]
optimizer: {{lr: 1.0e-3}}
"""


@pytest.fixture
def work(corpus, tmp_path):
    """A folder with a good recipe, and one good text."""
    (tmp_path / "r.yaml").write_text(RECIPE.format(tokenizer=corpus.tokenizer, train=corpus.train))
    (tmp_path / "good.jsonl").write_text('{"text": "We the people"}\n')
    return tmp_path


def refused(work: Path, *arguments: str) -> str:
    """Run `mlmclm` as its entry point does, check the manner of its refusal, and return the line.

    In this process: another one for each mistake would cost seconds.
    """
    before, said = files(work), io.StringIO()
    with contextlib.chdir(work), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as left:
        run_cleanly(lambda: dispatch([*arguments]))
    line = said.getvalue()
    assert left.value.code == 2, line
    assert line.startswith("mlmclm: error: ")
    assert line.count("\n") == 1, line
    assert files(work) == before
    return line


def files(work: Path) -> list[Path]:
    return sorted(path for path in work.rglob("*") if path.is_file())


TEXTS = {
    "missing.jsonl": (None, "missing.jsonl"),
    "empty.jsonl": (b"", "empty.jsonl"),
    "invalid.jsonl": (b'{"text": "a"}\n{"text": \n', "invalid.jsonl:2"),
    "nokey.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "nokey.jsonl:2"),
    "null.jsonl": (b'{"text": null}\n', "null.jsonl:1"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "caf\xe9"}\n', "latin.jsonl:2"),
    "latin.txt": (b"fine\ncaf\xe9\n", "latin.txt:2"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text(work, corpus, name):
    content, where = TEXTS[name]
    if content is not None:
        (work / name).write_bytes(content)
    assert where in refused(work, "preprocess", name, "--tokenizer", corpus.tokenizer, "--output", "out/data")


def test_no_tokenizer(work):
    assert "nowhere" in refused(work, "preprocess", "good.jsonl", "--tokenizer", "nowhere", "--output", "out/data")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_cut_data(work, corpus, suffix):
    for end in (".bin", ".idx"):
        shutil.copy(f"{corpus.valid}{end}", work / f"cut{end}")
    whole = (work / f"cut{suffix}").read_bytes()
    (work / f"cut{suffix}").write_bytes(whole[:-2])
    assert f"cut{suffix}" in refused(work, "inspect", "cut")
    assert f"cut{suffix}" in refused(work, "train", "r.yaml", "data.train=cut")


def test_bin_and_idx_of_different_data(work, corpus):
    shutil.copy(f"{corpus.valid}.bin", work / "mixed.bin")
    shutil.copy(f"{corpus.train}.idx", work / "mixed.idx")
    assert "mixed.bin" in refused(work, "inspect", "mixed")


def test_a_plan_that_is_cut_or_of_other_data(work, corpus):
    for end in (".bin", ".idx"):
        shutil.copy(f"{corpus.valid}{end}", work / f"d{end}")
    command = [sys.executable, "-m", "megatron_mlmclm.cli", "pack", "d", "--seq-length", "64"]
    subprocess.run(command, cwd=work, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=300)
    packed = ["train", "r.yaml", "data.train=d", "data.packing=packed"]
    whole = (work / "d.64.pack").read_bytes()
    (work / "d.64.pack").write_bytes(whole[:-2])
    for arguments in (packed, ["inspect", "d"]):
        line = refused(work, *arguments)
        assert "d.64.pack" in line and "cut" in line and "mlmclm pack d --seq-length 64" in line
    (work / "d.64.pack").write_bytes(whole)
    for end in (".bin", ".idx"):
        shutil.copy(f"{corpus.train}{end}", work / f"d{end}")
    assert "is of other data" in refused(work, *packed)
    assert "no such file" in refused(work, "pack", "nowhere", "--seq-length", "64")
    assert "--seq-length 0" in refused(work, "pack", "d", "--seq-length", "0")


def without_mask(work: Path, corpus) -> str:
    shutil.copytree(corpus.tokenizer, work / "plain")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (work / "plain" / name).is_file():
            values = json.loads((work / "plain" / name).read_text())
            values.pop("mask_token", None)
            (work / "plain" / name).write_text(json.dumps(values))
    return "data.tokenizer=plain"


RECIPES = {
    "sequence longer than the data": (["model.seq_length=10000000"], ["10,000,001"]),
    "tp does not divide heads": (["parallel.tensor_model_parallel_size=3"], ["num_attention_heads (4)", "(3)"]),
    "tp does not divide kv heads": (["parallel.tensor_model_parallel_size=4"], ["num_query_groups (2)", "(4)"]),
    "tp does not divide the vocabulary": (
        ["parallel.tensor_model_parallel_size=2", "model.padded_vocab_size=1003"],
        ["padded_vocab_size (1003)", "(2)"],
    ),
    "phase of zero steps": (["phases.1.steps=0"], ["phases.1.steps", "greater than 0"]),
    "unknown key": (["optimizer.warmup_stps=3"], ["optimizer.warmup_stps", "did you mean warmup_steps?"]),
    "ratio of zero": (["phases.1.mask_ratio=0"], ["phases.1.mask_ratio", "greater than 0"]),
    "ratio above one": (["phases.1.mask_ratio=1.2"], ["phases.1.mask_ratio", "less than or equal to 1"]),
    "range above one": (
        ["phases.1={objective: diffusion, steps: 2, mask_ratio: [0.5, 1.5]}"],
        ["phases.1.mask_ratio.1", "1.5"],
    ),
    "shares": (["phases.1.corruption={mask: 0.8, random: 0.1}"], ["phases.1.corruption", "must sum to 1"]),
    "spans longer than their maximum": (
        ["phases.1.corruption={selection: spans, span: {mean: 5, max: 3}}"],
        ["phases.1.corruption.span", "mean 5.0 is above max 3"],
    ),
    "ratio schedule longer than its phase": (
        ["phases.1.mask_ratio={start: 0.5, end: 0.1, steps: 3}"],
        ["phases.1.mask_ratio needs 3 steps, the phase has 2"],
    ),
    "phase shorter than its warm-up and decay": (
        ["phases.1.lr={warmup_steps: 2, decay_steps: 1}"],
        ["phases.1.lr.warmup_steps (2) + decay_steps (1)", "2 steps"],
    ),
    "run shorter than its warm-up and decay": (
        ["optimizer.warmup_steps=3", "optimizer.decay_steps=2"],
        ["optimizer.warmup_steps (3) + decay_steps (2)", "4 steps"],
    ),
    "reset of no optimizer": (["phases.0.optimizer=reset"], ["phases.0.optimizer: reset", "start.from"]),
    "no length": (["phases.1={objective: mlm, mask_ratio: 0.4}"], ["phases.1 has no length", "tokens or samples"]),
    "two lengths": (["phases.1.tokens=100"], ["phases.1", "one length"]),
    "a layer that is not there": (["phases.1.freeze=[layers.0-2]"], ["phases.1.freeze names layers.2", "2 layers"]),
    "a mix of one": (
        ["phases.1={objective: mixed, steps: 2, parts: [{objective: clm, share: 1}]}"],
        ["phases.1", "two or more parts"],
    ),
    "prefix of an mlm phase": (["phases.1.attention=prefix"], ["phases.1", "prefix is for clm"]),
    "batch of a phase": (
        ["phases.1.batch={micro_batch_size: 2, global_batch_size: 3}"],
        ["phases.1.batch.global_batch_size (3)", "(2)"],
    ),
    "unknown packing": (["data.packing=best"], ["data.packing", "'cut', 'documents' or 'packed'"]),
    "packed without a plan": (["data.packing=packed"], [".64.pack: no such plan", "mlmclm pack", "--seq-length 64"]),
    "prefix across documents": (
        ["data.packing=documents", "phases.0={objective: clm, steps: 2, attention: prefix, prefix: [0.2, 0.8]}"],
        ["phases.0.attention: prefix", "data.packing: documents", "data.packing=cut"],
    ),
    "branch off nothing": (["start={from: nowhere}"], ["nowhere: no Megatron checkpoint"]),
    "budget of nothing": (["compute={equal: steps, to: r.yaml}"], ["compute.equal", "predicted tokens"]),
    "processes": (["parallel.pipeline_model_parallel_size=2"], ["number of processes (1)", "(2)"]),
}


FLAGS = {
    "a flag that is the recipe's": (["--lr", "3"], "optimizer.lr=..."),
    "a flag without a key of its name": (["--train-iters=3"], "--train-iters is the recipe's"),
    "CUDA graphs and two patterns": (["--cuda-graph-impl", "local"], "need causal and bidirectional"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_bad_flag(work, case):
    flags, words = FLAGS[case]
    assert words in refused(work, "train", "r.yaml", *flags)


PARTS = "[{objective: clm, share: 1}, {objective: mntp, share: 1, mask_ratio: 0.3}]"
MIXED = f"phases.1={{objective: mixed, steps: 2, parts: {PARTS}}}"


def test_a_mix_by_samples_under_cuda_graphs(work):
    line = refused(work, "train", "r.yaml", MIXED, "--cuda-graph-impl", "local")
    assert "--cuda-graph-impl" in line
    assert "phases.1 (mixed)" in line


def test_whole_words_of_a_tokenizer_that_does_not_tell_them(work):
    from tokenizers import Tokenizer, models

    pieces = {piece: number for number, piece in enumerate(["[MASK]", *"abcdefghijklmnopqrstuvwxyz "])}
    (work / "letters").mkdir()
    Tokenizer(models.BPE(pieces, [])).save(str(work / "letters" / "tokenizer.json"))
    (work / "letters" / "tokenizer_config.json").write_text('{"mask_token": "[MASK]"}')
    line = refused(work, "train", "r.yaml", "data.tokenizer=letters", "phases.1.corruption={selection: words}")
    assert "letters" in line
    assert "spans" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["model.seq_length=16"], ["seq_length was 32, the recipe has 16", "--allow seq_length"]),
        (["data.train={valid}"], ["its data was", "--allow data"]),
        (["data.tokenizer=other"], ["its tokenizer was", "--allow tokenizer"]),
        (["seed=1"], ["seed 77", "seed 1", "start.data=restart"]),
        (["model.hidden_size=128"], ["model.hidden_size is 64 there, 128"]),
        (["parallel.use_distributed_optimizer=true"], ["plain", "distributed", "optimizer=reset"]),
    ],
)
def test_a_branch_off_another_trunk(work, corpus, worlds, change, words):
    """The trunk is a run of the layouts tests: TP1, plain optimizer."""
    shutil.copytree(corpus.tokenizer, work / "other")
    settings = json.loads((work / "other" / "tokenizer.json").read_text())
    settings["normalizer"] = {"type": "Lowercase"}
    (work / "other" / "tokenizer.json").write_text(json.dumps(settings))
    for end in (".bin", ".idx"):  # without the sidecar, which would tell the tokenizer first
        shutil.copy(f"{corpus.train}{end}", work / f"bare{end}")
    data = f"data={{tokenizer: {corpus.tokenizer}, train: bare}}"
    trunk = worlds.folder / "tp1" / "checkpoints" / "iter_0000008"
    plain = "parallel.use_distributed_optimizer=false"
    extra = [entry.format(valid=corpus.valid) for entry in change]
    recipe = [data, "output=branch", f"start={{from: {trunk}}}", plain, *extra]
    line = refused(work, "train", str(worlds.recipe), *recipe)
    assert all(word in line for word in words), line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--recompute-granularity", "full"], "recompute_method must be"),
    ],
)
def test_what_megatron_refuses(work, flags, words):
    """Found by the started ranks: one line all the same, and no recipe is recorded."""
    command = [sys.executable, "-m", "megatron_mlmclm.cli", "train", "r.yaml", "--nproc", "2", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (work / "run" / "recipe.yaml").exists()


@pytest.mark.parametrize("case", RECIPES)
def test_bad_recipe(work, case):
    overrides, words = RECIPES[case]
    line = refused(work, "train", "r.yaml", *overrides)
    assert all(word in line for word in words), line


def test_mlm_without_a_mask_token(work, corpus):
    assert "add-mask" in refused(work, "train", "r.yaml", without_mask(work, corpus))


def test_data_of_another_tokenizer(work, corpus):
    for end in (".bin", ".idx", ".json"):
        shutil.copy(f"{corpus.valid}{end}", work / f"other{end}")
    sidecar = json.loads((work / "other.json").read_text())
    (work / "other.json").write_text(json.dumps({**sidecar, "tokenizer_fingerprint": "0" * 64}))
    assert "another tokenizer" in refused(work, "train", "r.yaml", "data.train=other")


def test_a_vocabulary_too_large_for_the_dtype(tmp_path):
    import numpy as np

    from megatron_mlmclm.data import IndexedWriter
    from megatron_mlmclm.errors import UserError

    with pytest.raises(UserError, match="65,?536"), IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([1, 65_536])
    assert list(tmp_path.iterdir()) == []


def test_the_process_itself_ends_with_status_two(work):
    command = [sys.executable, "-m", "megatron_mlmclm.cli", "train", "r.yaml", "phases.1.mask_ratio=0"]
    done = subprocess.run(command, cwd=work, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("mlmclm: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


def test_an_unknown_verb_is_refused_by_name(work):
    command = [sys.executable, "-m", "megatron_mlmclm.cli", "trian"]
    done = subprocess.run(command, cwd=work, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "trian" in done.stderr
