"""Plans: the paper's own numbers, and agreement with what transformers counts and Megatron does."""

from pathlib import Path

import pytest
import yaml

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import check_recipe, learning_rate, load_recipe, preset_names
from megatron_mlmclm.recipe.budget import KINDS
from megatron_mlmclm.recipe.shown import masked
from megatron_mlmclm.study import plan
from megatron_mlmclm.study.tables import amount, equalised
from tests.hf_models import make

NODE = 8  # devices
FROM_HF = "from-hf/"
FORMS = Path(__file__).with_name("forms.yaml")  # one phase of every kind


def test_presets_that_start_from_a_hugging_face_model(corpus, tmp_path):
    """They take the model's shape from its folder, which is the user's."""
    names = [name for name in preset_names() if name.startswith(FROM_HF)]
    assert [name.removeprefix(FROM_HF) for name in names] == ["clm-detour", "mlm", "mntp"]
    folder = make("llama", tmp_path / "llama", corpus.tokenizer, max_position_embeddings=2048)
    for name in names:
        recipe = load_recipe(name, [f"start.hf={folder}", f"data.tokenizer={corpus.tokenizer}"])
        assert (recipe.model.num_layers, recipe.model.vocab_size) == (4, 1003)
        plan(recipe)
        check_recipe(recipe, NODE, 1003)


@pytest.mark.parametrize("name", [name for name in preset_names() if not name.startswith(FROM_HF)])
def test_every_preset_plans_and_would_start(name, capsys):
    dispatch(["plan", name])
    recipe = load_recipe(name)
    assert recipe.name == name.rpartition("/")[2]
    assert recipe.name in capsys.readouterr().out
    check_recipe(recipe, NODE, recipe.model.padded_vocab_size)


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


def test_flops_are_split_into_body_attention_and_head(capsys):
    found = plan(load_recipe("paper/610m-mlm40-42k", []))
    model, cost = found.recipe.model, found.cost
    assert cost.body == pytest.approx(6 * found.parameters.layers * cost.tokens)
    assert cost.head == pytest.approx(6 * found.rows * model.hidden_size * cost.predicted)
    heads = model.num_attention_heads * model.head_dim
    assert cost.attention == pytest.approx(12 * model.num_layers * heads * model.seq_length * cost.tokens)
    assert cost.flops == cost.body + cost.attention + cost.head
    dispatch(["plan", "paper/610m-mlm40-42k"])
    assert f"head {amount(cost.head / cost.tokens)} ({cost.head / cost.flops:.0%})" in capsys.readouterr().out


def test_flops_count_the_head_for_predicted_tokens_only():
    clm = plan(load_recipe("paper/210m-mlm40-42k", ["phases=[{objective: clm, steps: 42000}]"]))
    mlm = plan(load_recipe("paper/210m-mlm40-42k"))
    head = 6 * 128_256 * 768
    scores = 12 * 12 * 768 * 2048
    assert mlm.predicted == pytest.approx(0.4 * mlm.tokens)
    assert clm.flops - mlm.flops == pytest.approx(mlm.tokens * (0.6 * head - 0.5 * scores))


@pytest.mark.parametrize(
    ("name", "steps", "tokens", "rates"),
    [
        ("paper/610m-clm-42k", [42_000], [99.1], [(0, 5e-4, 2.5e-7)]),
        ("paper/610m-cpt-clm42k-mlm40-22k", [22_000], [51.9], [(0, 5e-4, 2.5e-7)]),
        ("ettin/decoder-to-encoder", [1357], [50.0], [(0, 4e-4, 4e-4 * (0.02 + 0.98 / 271))]),
        ("clm-detour", [15_895, 1590], [50.0, 5.0], [(2e-4,) * 3, (2e-4, 2e-4, 2.0057e-5)]),
        ("llm2vec-mntp", [1000], [0.0164], [(5e-5,) * 3]),
        ("gpt-bert", [7812], [20.5], [(0, 1e-3, 1e-4)]),
    ],
)
def test_presets_are_as_long_and_fast_as_their_sources_say(name, steps, tokens, rates):
    phases = plan(load_recipe(name)).phases
    assert [phase.stretch.steps for phase in phases] == steps
    assert [phase.cost.tokens / 1e9 for phase in phases] == pytest.approx(tokens, rel=2e-3)
    for phase, expected in zip(phases, rates, strict=True):
        assert phase.rates == pytest.approx(expected, rel=1e-3)


def test_columns_and_notes_show_every_form_of_phase(tmp_path, capsys):
    values = yaml.safe_load(FORMS.read_text())
    plain = {**values, "phases": [{"objective": "mlm", "mask_ratio": 0.4, "steps": 2000}], "compute": None}
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(plain))
    dispatch(["plan", str(FORMS), f"compute.to={tmp_path / 'plain.yaml'}", "--png", str(tmp_path / "p.png")])
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for shown in (
        "trunk (clm) 300 prefix 10%-90%",
        "mlm 200 bidirectional 50% to 10%",
        "clm 25% causal",
        "mntp 75% bidirectional 40% to 20%",
        "mlm 30 in 40 bidirectional 30%",
        "diffusion 1,",
        "4,096 tokens a step",
        "starts from runs/x, data: continue; steps count from there",
        "as many FLOPs as",
        "phases.1: optimizer reset; frozen: embedding, layers.0-1",
        "phases.2: one objective a batch; data: replay",
        "phases.3: 64 sequences a step; data: data/b, data/c",
    ):
        assert any(shown in row for row in rows), shown
    assert "0 to 5e-4" in " ".join(rows)


def test_numbers_are_short():
    assert [amount(number) for number in (820, 16_384, 12.29e6, 99.09e9, 1.7e12, 3.82e20)] == [
        *("820", "16.38e3", "12.29e6", "99.09e9", "1.7e12", "3.82e20")
    ]
    assert [masked(ratio) for ratio in (None, 0.4, 0.125, (0.1, 1.0))] == ["", "40%", "12.5%", "10%-100%"]


def test_budgets_compare_in_all_three_currencies(capsys):
    names = ["paper/610m-mlm40-42k", "paper/610m-clm-10k-mlm40-42k", "paper/610m-clm-42k"]
    dispatch(["plan", *names, "--equal", "predicted tokens"])
    out = capsys.readouterr().out
    table = out[out.index("of the first recipe's") :].splitlines()
    ratios = [line.split()[2::2] for line in table if line.strip().startswith("610m") and ":" not in line]
    assert ratios == [["1.000"] * 3, ["1.000", "1.357", "1.010"], ["1.000", "2.500", "1.043"]]
    assert "610m-clm-10k-mlm40-42k: phases.1.steps=17,000 (now 32,000) gives it the predicted tokens of" in out
    assert "610m-clm-42k: phases.0.steps=16,800 (now 42,000)" in out


def test_equal_budgets_are_equal_and_impossible_ones_say_so():
    first, other = (plan(load_recipe(name)) for name in ("paper/210m-mlm40-42k", "paper/610m-clm-10k-mlm40-42k"))
    for kind in KINDS[:2]:
        steps = int(equalised(first, other, kind).split("steps=")[1].split()[0].replace(",", ""))
        changed = plan(load_recipe("paper/610m-clm-10k-mlm40-42k", [f"phases.1.steps={steps}"]))
        assert changed.cost.of(kind) == pytest.approx(first.cost.of(kind), rel=1e-4)
    long = plan(load_recipe("paper/1b-clm-10k-mlm40-42k", ["phases.0.steps=40000"]))
    assert "nothing is left for phases.1" in equalised(first, long, "FLOPs")
    with pytest.raises(UserError, match="--equal compares recipes"):
        dispatch(["plan", "paper/210m-mlm40-42k", "--equal", "FLOPs"])


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
