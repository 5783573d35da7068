"""Plans: the paper's own numbers, and agreement with what transformers counts and Megatron does."""

import pytest

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import learning_rate, load_recipe, preset_names
from megatron_mlmclm.study import plan


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_plans(name, capsys):
    dispatch(["plan", name])
    assert load_recipe(name).name == name.rpartition("/")[2]
    assert load_recipe(name).name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "total", "layers"),
    [
        ("paper/210m-mlm40-42k", 310.3, 113.3),
        ("paper/610m-mlm40-42k", 755.6, 460.1),
        ("paper/610m-clm-10k-mlm40-42k", 755.6, 460.1),
        ("paper/1b-mlm40-42k", 1409.5, 966.2),
    ],
)
def test_the_papers_sizes_and_budget(name, total, layers):
    each = plan(load_recipe(name))
    assert round(each.parameters.total / 1e6, 1) == total
    assert round(each.parameters.layers / 1e6, 1) == layers
    assert (each.tokens_per_step, each.steps) == (2_359_296, 42_000)
    assert round(each.tokens / 1e9, 1) == 99.1


def test_parameters_are_those_that_transformers_counts():
    import torch
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    recipe = load_recipe("paper/610m-mlm40-42k", ["model.padded_vocab_size=1003", "model.num_layers=2"])
    model = recipe.model
    config = EuroBertConfig(
        vocab_size=1003,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        pad_token_id=None,
    )
    with torch.device("meta"):
        counted = sum(p.numel() for p in EuroBertForMaskedLM(config).parameters())
    assert plan(recipe).parameters.total == counted


def test_flops_count_the_head_for_predicted_tokens_only():
    clm = plan(load_recipe("paper/210m-mlm40-42k", ["phases=[{objective: clm, steps: 42000}]"]))
    mlm = plan(load_recipe("paper/210m-mlm40-42k"))
    head = 6 * 128_256 * 768
    scores = 12 * 12 * 768 * 2048
    assert mlm.predicted == pytest.approx(0.4 * mlm.tokens)
    assert clm.flops - mlm.flops == pytest.approx(mlm.tokens * (0.6 * head - 0.5 * scores))


def test_a_vocabulary_that_is_not_known_is_asked_for():
    with pytest.raises(UserError, match="model.padded_vocab_size=N"):
        plan(load_recipe("paper/210m-mlm40-42k", ["model.padded_vocab_size=null"]))


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(UserError, match="presets: .*paper/1b-mlm40-42k"):
        load_recipe("paper/7b")


def test_the_picture_is_written(tmp_path):
    dispatch(["plan", "paper/610m-clm-10k-mlm40-42k", "--png", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="draws one recipe"):
        dispatch(["plan", "paper/210m-mlm40-42k", "paper/1b-mlm40-42k", "--png", str(tmp_path / "q.png")])


@pytest.mark.slow
def test_megatron_trains_with_the_planned_learning_rate(worlds):
    recipe = load_recipe(worlds.recipe)
    found = [record["lr"] for record in worlds.metrics("tp1")]
    assert found == pytest.approx([learning_rate(recipe, step) for step in range(1, 21)], rel=1e-6)
