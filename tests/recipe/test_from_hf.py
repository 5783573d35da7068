"""A recipe that starts from a Hugging Face model, imported or not: what is read from there, and what is refused."""

import json

import pytest
import yaml

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import load_recipe, megatron_flags, parse_recipe
from tests.hf_models import make
from tests.recipe.test_recipe import VALUES, changed


def write(path, values):
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def models(corpus, tmp_path):
    """Folders by name, made when asked for."""
    return lambda name: make(name, tmp_path / name, corpus.tokenizer)


def test_the_model_is_read_from_the_folder(models, tmp_path):
    file = write(tmp_path / "r.yaml", {**VALUES, "model": {"seq_length": 32}, "start": {"hf": str(models("llama3"))}})
    model = load_recipe(file).model
    assert (model.num_layers, model.kv_heads, model.rotary_base, model.vocab_size) == (2, 2, 500_000, 1003)
    assert (model.rope_scaling.factor, model.rope_scaling.original_max_position_embeddings) == (6.0, 512)


@pytest.mark.parametrize(("name", "flag"), [("qwen2", "--add-qkv-bias"), ("qwen3", "--qk-layernorm")])
def test_options_of_a_family_are_megatrons(models, tmp_path, name, flag):
    plain = load_recipe(write(tmp_path / "plain.yaml", VALUES))
    start = {**VALUES, "model": {"seq_length": 32}, "start": {"hf": str(models(name))}}
    recipe = load_recipe(write(tmp_path / "r.yaml", start))
    flags = [megatron_flags(each, each.segment_after(0), vocab_size=1003, platform="cpu") for each in (plain, recipe)]
    assert [flag in each for each in flags] == [False, True]


def test_an_imported_model_says_its_shape_too(models, tmp_path):
    dispatch(["import-hf", str(models("smollm")), "--output", str(tmp_path / "imported")])
    start = {"from": str(tmp_path / "imported")}
    recipe = load_recipe(write(tmp_path / "r.yaml", {**VALUES, "model": {"seq_length": 16}, "start": start}))
    assert (recipe.model.tie_embeddings, recipe.model.rotary_base, recipe.model.seq_length) == (True, 100_000, 16)


def test_a_run_that_has_begun_does_not_need_the_folder(models, tmp_path):
    folder = models("llama")
    values = {**VALUES, "output": str(tmp_path / "run"), "model": {"seq_length": 32}, "start": {"hf": str(folder)}}
    file = write(tmp_path / "r.yaml", values)
    before = load_recipe(file)
    kept = tmp_path / "run" / "source"
    kept.mkdir(parents=True)
    folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="config.json"):
        load_recipe(file)
    (kept / "config.json").write_bytes((tmp_path / "moved" / "config.json").read_bytes())
    assert load_recipe(file) == before


def test_what_the_user_says_must_be_so(models, tmp_path):
    folder = models("mistral")  # it takes 64 positions, of which it sees 32
    start = {**VALUES, "model": {"seq_length": 33}, "start": {"hf": str(folder)}}
    with pytest.raises(UserError, match="model.seq_length is 33.*at most 32"):
        load_recipe(write(tmp_path / "r.yaml", start))
    with pytest.raises(UserError, match="model.hidden_size is 48 in .*, 64 in the recipe"):
        load_recipe(write(tmp_path / "r.yaml", {**start, "model": {"seq_length": 32, "hidden_size": 64}}))
    with pytest.raises(UserError, match="seq_length is missing"):
        load_recipe(write(tmp_path / "r.yaml", {**start, "model": None}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("start", {}, "either from .* or hf"),
        ("start", {"from": "a", "hf": "b"}, "either from .* or hf"),
        ("model.rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "rope_scaling.rope_type"),
        ("model.rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "go with rope_type: llama3"),
        ("model.rope_scaling", {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "go with rope_type"),
    ],
)
def test_values_that_do_not_go_together(key, value, message):
    with pytest.raises(UserError, match=message):
        parse_recipe(changed(key, value), "r.yaml")


def test_a_bias_after_attention_must_be_zero(corpus, tmp_path):
    """`attention_bias` puts one there, and Megatron has none."""
    from safetensors.torch import load_file, save_file

    folder = make("llama-mha", tmp_path / "llama", corpus.tokenizer)
    name = "model.layers.0.self_attn.o_proj.bias"
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name] + 1}, file)
    with pytest.raises(UserError, match="o_proj.bias is not zero"):
        dispatch(["import-hf", str(folder), "--output", str(tmp_path / "out")])
