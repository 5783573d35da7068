"""A Hugging Face folder that is not what it says ends in one line and leaves nothing behind (DESIGN, invariant 8)."""

import contextlib
import json
import pickle
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.convert.checkpoint import CheckpointReader
from megatron_mlmclm.convert.write import Piece, write_checkpoint
from megatron_mlmclm.errors import UserError
from tests.hf_models import make

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def refused(work: Path, *arguments: str) -> str:
    """Run a verb in this process, check that it refuses and writes nothing, and return what it says."""
    before = sorted(work.rglob("*"))
    with pytest.raises(UserError) as found:
        dispatch([*arguments])
    assert sorted(work.rglob("*")) == before
    return str(found.value)


def change(path: Path, edit) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def rewrite(folder: Path, name: str, new) -> None:
    """Put `new(tensor)` in the place of the tensor."""
    path = shard_of(folder, name)
    tensors = load_file(path)
    save_file(tensors | {name: new(tensors[name])}, path)


def config(**values):
    return lambda folder: change(folder / "config.json", lambda found: found.update(values))


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
SPOILED = {
    "missing shard": (lambda d: shard_of(d, NORM).unlink(), ["this shard is missing"]),
    "index naming a tensor that is not there": (
        lambda d: change(d / INDEX, lambda v: v["weight_map"].update(extra=v["weight_map"][NORM])),
        ["does not hold extra"],
    ),
    "index that is none": (lambda d: (d / INDEX).write_text("[]"), [INDEX, "weight_map"]),
    "wrong shape": (lambda d: rewrite(d, NORM, lambda t: t[:-1].clone()), [NORM, "[47]", "[48]"]),
    "not floating point": (lambda d: rewrite(d, NORM, lambda t: t.to(torch.int8)), [NORM, "I8"]),
    "truncated": (
        lambda d: shard_of(d, NORM).write_bytes(shard_of(d, NORM).read_bytes()[:-8]),
        ["cannot be read", "is it whole?"],
    ),
    "fewer layers in the weights": (config(num_hidden_layers=5), ["model.layers.4.", "missing"]),
    "more layers in the weights": (config(num_hidden_layers=3), ["no place for model.layers.3."]),
    "other heads": (config(num_key_value_heads=4), ["k_proj", "[24, 48]", "[48, 48]"]),
    "tied but with a head of its own": (config(tie_word_embeddings=True), ["tied", "lm_head.weight differs"]),
    "bias after attention": (config(mlp_bias=True), ["mlp_bias is True"]),
    "another activation": (config(hidden_act="gelu"), ["hidden_act is gelu"]),
    "yarn": (config(rope_parameters=YARN), ["yarn is not supported", "linear", "llama3"]),
    "unknown architecture": (
        config(architectures=["MambaForCausalLM"]),
        ["MambaForCausalLM is not known", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "no architecture": (lambda d: change(d / "config.json", lambda v: v.pop("architectures")), ["architectures"]),
    "config that is no JSON": (lambda d: (d / "config.json").write_text("{"), ["config.json"]),
    "value of another type": (config(hidden_size="48"), ["config.json", "hidden_size"]),
    "quantized": (config(quantization_config={"quant_method": "awq"}), ["quantized"]),
    "no layers": (config(num_hidden_layers=0), ["config.json", "num_layers"]),
    "key heads that do not divide the heads": (config(num_key_value_heads=3), ["(4)", "(3)"]),
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json", "cannot be read"]),
    "no weights": (lambda d: [f.unlink() for f in d.glob("model*")], ["no weights there"]),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), ["tokenizer.json"]),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_folder_is_refused(llama, tmp_path, case):
    spoil, words = SPOILED[case]
    spoil(llama)
    line = refused(tmp_path, "import-hf", str(llama), "--output", str(tmp_path / "out"))
    assert all(word in line for word in words), line


def test_a_vocabulary_smaller_than_the_tokenizers(corpus, tmp_path):
    folder = make("llama", tmp_path / "small", corpus.tokenizer, vocab_size=900)
    line = refused(tmp_path, "import-hf", str(folder), "--output", str(tmp_path / "out"))
    assert "1003 ids" in line and "900" in line


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def as_pickle(folder: Path, content) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(content, folder / "pytorch_model.bin")


def test_a_pickle_is_read_only_when_allowed_and_never_executed(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = {key: value for file in llama.glob("model-*") for key, value in load_file(file).items()}
    as_pickle(llama, weights)
    command = ["import-hf", str(llama), "--output", str(tmp_path / "out")]
    assert "--allow-pickle" in refused(tmp_path, *command)
    dispatch([*command, "--allow-pickle"])
    found = CheckpointReader(tmp_path / "out" / "checkpoints" / "release").read("decoder.final_layernorm.weight")
    assert torch.equal(found, weights[NORM])
    as_pickle(llama, {**weights, "evil": Evil()})
    line = refused(tmp_path, *command[:-1], str(tmp_path / "again"), "--allow-pickle")
    assert "pytorch_model.bin" in line
    assert not (tmp_path / "executed").exists()
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    assert "pytorch_model.bin" in refused(tmp_path, *command[:-1], str(tmp_path / "again"), "--allow-pickle")
    assert not (tmp_path / "executed").exists()


@contextlib.contextmanager
def full_disk(limit: int):
    """No file may grow beyond `limit` bytes: what a full disk does to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_half_way(llama, tmp_path):
    """Neither direction leaves a part of its output behind."""
    with full_disk(300_000):
        line = refused(tmp_path, "import-hf", str(llama), "--output", str(tmp_path / "out"))
    assert "cannot write" in line
    dispatch(["import-hf", str(llama), "--output", str(tmp_path / "whole")])
    with full_disk(300_000):
        line = refused(tmp_path, "export-hf", str(tmp_path / "whole"), "--output", str(tmp_path / "out"))
        assert "cannot write" in line
        line = refused(tmp_path, "merge", str(tmp_path / "whole"), str(tmp_path / "whole"), "--output", "out")
        assert "cannot write" in line


def test_a_checkpoint_without_a_recipe(tmp_path):
    piece = Piece("decoder.final_layernorm.weight", (4,), torch.float32, lambda: torch.zeros(4))
    write_checkpoint(tmp_path / "foreign", [piece], {})
    line = refused(tmp_path, "export-hf", str(tmp_path / "foreign"), "--output", str(tmp_path / "out"))
    assert "holds no recipe" in line


def test_a_checkpoint_that_does_not_fit(llama, tmp_path):
    from megatron_mlmclm.convert.checkpoint import read_common

    dispatch(["import-hf", str(llama), "--output", str(tmp_path / "whole")])
    folder = tmp_path / "whole" / "checkpoints" / "release"
    reader, common = CheckpointReader(folder), read_common(folder)
    names = [name for name in reader.shape if name != "decoder.final_layernorm.weight"]
    pieces = [
        Piece(name, shape, reader.dtype[name], lambda name=name: reader.read(name))
        for name, shape in ((name, reader.shape[name]) for name in names)
    ]
    write_checkpoint(tmp_path / "cut", pieces, common)
    (tmp_path / "whole" / "tokenizer").rename(tmp_path / "cut" / "tokenizer")
    line = refused(tmp_path, "export-hf", str(tmp_path / "cut"), "--output", str(tmp_path / "out"))
    assert "final_layernorm.weight is not in it" in line


RECIPE = """
name: bad
output: {folder}/run
model: {{seq_length: 32}}
data: {{tokenizer: {tokenizer}, train: {train}}}
batch: {{micro_batch_size: 1, global_batch_size: 1}}
phases: [{{objective: mlm, steps: 2, mask_ratio: 0.4}}]
optimizer: {{lr: 1.0e-3}}
start: {{hf: {folder}/llama}}
"""
STARTS = {
    "model.num_layers=3": ["model.num_layers is 4", "3 in the recipe"],
    "model.seq_length=64": ["model.seq_length is 64", "at most 32"],
    "start.hf=nowhere": ["nowhere/config.json"],
    "start.from=runs/other": ["either from", "or hf"],
    "parallel.tensor_model_parallel_size=4": ["num_query_groups (2)", "(4)"],
}


@pytest.mark.parametrize("override", STARTS)
def test_a_start_that_does_not_fit(llama, corpus, tmp_path, override):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path, tokenizer=corpus.tokenizer, train=corpus.train))
    line = refused(tmp_path, "train", str(recipe), override)
    assert all(word in line for word in STARTS[override]), line


def test_a_start_from_a_spoiled_folder(llama, corpus, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path, tokenizer=corpus.tokenizer, train=corpus.train))
    rewrite(llama, NORM, lambda tensor: tensor[:-1].clone())
    assert NORM in refused(tmp_path, "train", str(recipe))


def test_models_that_do_not_merge(llama, corpus, tmp_path):
    other = make("qwen2", tmp_path / "other", corpus.tokenizer)
    dispatch(["import-hf", str(llama), "--output", str(tmp_path / "imported")])
    out = ["--output", str(tmp_path / "out")]
    assert "only models of one shape" in refused(tmp_path, "merge", str(llama), str(other), *out)
    assert "convert one" in refused(tmp_path, "merge", str(llama), str(tmp_path / "imported"), *out)
    assert "--weight" in refused(tmp_path, "merge", str(llama), str(llama), "--weight", "2", *out)


def test_the_good_folder_is_whole(llama):
    """Else the refusals above would prove nothing."""
    with safe_open(shard_of(llama, NORM), framework="pt") as opened:
        assert NORM in opened.keys()  # noqa: SIM118


@pytest.mark.parametrize("name", ["garbage.gguf", "nowhere.gguf"])
def test_a_gguf_file_that_is_none(tmp_path, name):
    """Whether the packages that read it are here or not."""
    (tmp_path / "garbage.gguf").write_bytes(b"GGUF" + b"x" * 100)
    line = refused(tmp_path, "import-hf", str(tmp_path / name), "--output", str(tmp_path / "out"))
    assert name in line
