"""Reading, overriding and refusing recipes."""

import pytest
import yaml

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import (
    check_platform,
    check_recipe,
    dump_recipe,
    load_recipe,
    megatron_flags,
    owned_flags,
    parse_recipe,
)

VALUES = {
    "name": "small",
    "output": "runs/small",
    "model": {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "seq_length": 32},
    "data": {"tokenizer": "tok", "train": "data/a", "valid": "data/b"},
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "phases": [{"objective": "clm", "steps": 5}, {"objective": "mlm", "steps": 5, "mask_ratio": 0.4}],
    "optimizer": {"lr": 1e-3},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    return path


def changed(key: str, value) -> dict:
    values = yaml.safe_load(yaml.safe_dump(VALUES))
    *parents, last = key.split(".")
    node = values
    for part in parents:
        node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
    node[last] = value
    return values


def test_short_forms_and_defaults(file):
    recipe = load_recipe(file)
    assert [source.model_dump() for source in recipe.data.train] == [{"path": "data/a", "weight": 1.0}]
    assert (recipe.steps, recipe.model.kv_heads, recipe.model.head_dim) == (10, 4, 16)
    assert recipe.optimizer.adam_beta2 == 0.95


def test_overrides_reach_lists_sections_and_numbers(file):
    recipe = load_recipe(
        file, ["phases.1.mask_ratio=0.2", "optimizer.lr=2e-4", "parallel.sequence_parallel=true", "seed=9"]
    )
    assert (recipe.phases[1].mask_ratio, recipe.optimizer.lr, recipe.seed) == (0.2, 2e-4, 9)
    assert recipe.parallel.sequence_parallel is True


def test_a_dumped_recipe_reads_back_the_same(file):
    recipe = load_recipe(file)
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe)), "dump") == recipe


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.learning_rate", 1.0, "unknown key optimizer.learning_rate"),
        ("model.hidden_sise", 64, "did you mean hidden_size"),
        ("phases.1.mask_ration", 0.4, "did you mean mask_ratio"),
        ("phases.1.mask_ratio", 1.5, "phases.1.mask_ratio: .*less than or equal to 1"),
        ("phases.0.steps", 0, r"phases.0.steps: .*greater than 0 \(it is 0\)"),
        ("phases.0.mask_ratio", 0.4, "a clm phase masks nothing"),
        ("phases.1.mask_ratio", None, "an mlm phase needs mask_ratio"),
        ("phases.1.corruption", {"mask": 0.7}, "must sum to 1"),
        ("phases.1.corruption", {"masks": 0.7}, "did you mean mask"),
        ("phases.0.corruption", {"mask": 1.0}, "a clm phase masks nothing"),
        ("phases.0.objective", "cml", "phases.0.objective"),
        ("phases", [], "phases"),
        ("data.train", [], "data.train"),
        ("data.train", [{"path": "a", "weight": -1}], "weight"),
        ("data.packing", "pack", "data.packing: .*'cut', 'documents' or 'packed'"),
        ("optimizer.lr", "fast", "optimizer.lr"),
    ],
)
def test_a_bad_value_is_named_with_its_key(key, value, message):
    with pytest.raises(UserError, match=message):
        parse_recipe(changed(key, value), "r.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "write it as key=value"),
        ("phases.7.steps=3", "'7' is not an index below 2"),
        ("name.x=3", "has no keys below it"),
        ("seed=[", "not valid YAML"),
    ],
)
def test_a_bad_override_is_named(file, override, message):
    with pytest.raises(UserError, match=message):
        load_recipe(file, [override])


def test_a_file_that_is_no_recipe_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read the recipe"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,\nb: 2")
    with pytest.raises(UserError, match="not valid YAML on line 2"):
        load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UserError, match="a mapping"):
        load_recipe(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("changes", "world", "numbers"),
    [
        ({"parallel.tensor_model_parallel_size": 3}, 3, ("4", "3")),
        ({"parallel.tensor_model_parallel_size": 4, "model.num_query_groups": 2}, 4, ("num_query_groups (2)", "(4)")),
        ({"parallel.tensor_model_parallel_size": 2, "model.padded_vocab_size": 1003}, 2, ("1003", "(2)")),
        ({"model.padded_vocab_size": 999}, 1, ("999", "1000")),
        ({"model.num_attention_heads": 5}, 1, ("64", "5")),
        ({"model.num_query_groups": 3}, 1, ("4", "3")),
        ({"parallel.pipeline_model_parallel_size": 3}, 3, ("4", "3")),
        ({"parallel.num_virtual_stages_per_pipeline_rank": 2}, 1, ("2 or more", "1")),
        ({"parallel.sequence_parallel": True}, 1, ("2 or more", "1")),
        ({"parallel.tensor_model_parallel_size": 2}, 3, ("3", "2")),
        ({"batch.global_batch_size": 9}, 1, ("9", "2")),
        ({"batch.global_batch_size": 4, "validation.samples": 64}, 3, ("4", "6")),
        ({"validation.samples": 12}, 1, ("12", "8")),
        ({"optimizer.warmup_steps": 8, "optimizer.decay_steps": 3}, 1, ("8", "3", "10")),
        ({"optimizer.min_lr": 1.0}, 1, ("1.0", "0.001")),
        ({"model.kv_channels": 7}, 1, ("7",)),
        ({"parallel.context_parallel_size": 3}, 3, ("seq_length (32)", "2 * parallel.context_parallel_size (6)")),
        ({"parallel.context_parallel_size": 2}, 3, ("number of processes (3)", "(2)")),
        (
            {
                "parallel.context_parallel_size": 16,
                "parallel.tensor_model_parallel_size": 4,
                "parallel.sequence_parallel": True,
            },
            64,
            ("model.seq_length / parallel.context_parallel_size (2)", "(4)"),
        ),
        ({"model.global_attn_every_n_layers": 3}, 1, ("(3)", "model.window_size")),
    ],
)
def test_impossible_combinations_name_both_numbers(changes, world, numbers):
    values = VALUES
    for key, value in changes.items():
        values = {**values, **changed_section(values, key, value)}
    with pytest.raises(UserError) as refused:
        check_recipe(parse_recipe(values, "r.yaml"), world, vocab_size=1000)
    assert all(number in str(refused.value) for number in numbers), str(refused.value)


def changed_section(values: dict, key: str, value) -> dict:
    section, _, name = key.partition(".")
    return {section: {**values.get(section, {}), name: value}}


@pytest.mark.parametrize("packing", ["documents", "packed"])
def test_a_prefix_is_refused_where_documents_are_told_apart(packing):
    values = changed("phases.0.attention", "prefix")
    values["phases"][0]["prefix"] = [0.2, 0.8]
    check_recipe(parse_recipe(values, "r.yaml"), 1, vocab_size=1000)
    values["data"]["packing"] = packing
    with pytest.raises(UserError, match=f"phases.0.attention: prefix .* data.packing: {packing} .*data.packing=cut"):
        check_recipe(parse_recipe(values, "r.yaml"), 1, vocab_size=1000)
    part = {"objective": "clm", "attention": "prefix", "prefix": [0.2, 0.8], "share": 1}
    parts = [{"objective": "mlm", "mask_ratio": 0.4, "share": 1}, part]
    values["phases"] = [{"objective": "mixed", "steps": 10, "parts": parts}]
    with pytest.raises(UserError, match="phases.0.parts.1.attention: prefix"):
        check_recipe(parse_recipe(values, "r.yaml"), 1, vocab_size=1000)


def test_validation_measures_the_phases_unless_told_otherwise(file):
    assert load_recipe(file).validated == ["clm", "mlm"]
    assert load_recipe(file, ["validation.objectives=[mlm]"]).validated == ["mlm"]
    assert load_recipe(file, ["data.valid=[]"]).validated == []


def test_a_distributed_optimizer_that_could_not_be_resumed_is_refused(file):
    recipe = load_recipe(file)
    for layers, has_apex in (("cpu", False), ("te", False), ("cuda", True)):
        check_platform(recipe, layers, has_apex, has_liger=False)
    with pytest.raises(UserError, match="use_distributed_optimizer=false"):
        check_platform(recipe, "cuda", has_apex=False, has_liger=False)
    check_platform(
        load_recipe(file, ["parallel.use_distributed_optimizer=false"]), "cuda", has_apex=False, has_liger=False
    )


@pytest.mark.parametrize(
    ("overrides", "layers", "has_liger", "said"),
    [
        ([], "cpu", True, "needs a GPU"),
        ([], "te", False, "needs liger-kernel"),
        (["parallel.tensor_model_parallel_size=2"], "te", True, "tensor_model_parallel_size=1"),
    ],
)
def test_the_fused_head_says_what_it_needs(file, overrides, layers, has_liger, said):
    check_platform(load_recipe(file, ["head=fused"]), "te", has_apex=True, has_liger=True)
    with pytest.raises(UserError, match=said):
        check_platform(load_recipe(file, ["head=fused", *overrides]), layers, has_apex=True, has_liger=has_liger)


def test_a_window_is_flags_and_a_prefix_refuses_it(file):
    """ModernBERT's rule: of the layers counted from 0, those divisible by n see all."""
    recipe = load_recipe(file, ["model.window_size=[-1, 5]", "model.global_attn_every_n_layers=3"])
    flags = megatron_flags(recipe, recipe.segment_after(0), vocab_size=1000, platform="cpu")
    pairs = dict(zip(flags, flags[1:], strict=False))
    assert (pairs["--window-size"], pairs["--window-attn-skip-freq"]) == ("(-1,5)", "[0,1,1,0]")
    assert {"--window-size", "--context-parallel-size"} <= owned_flags(load_recipe(file))
    assert load_recipe(file, ["model.window_size=64"]).model.window_size == (64, 64)
    prefix = ["model.window_size=64", "phases.0.attention=prefix", "phases.0.prefix=[0.2, 0.8]"]
    with pytest.raises(UserError, match=r"phases.0: attention: prefix does not go with model.window_size \[64, 64\]"):
        check_recipe(load_recipe(file, prefix), 1, vocab_size=1000)


@pytest.mark.parametrize("value", [[1], [1, 2, 3], -2, [3, -2], "wide"])
def test_a_window_is_two_widths(value):
    with pytest.raises(UserError, match="model.window_size"):
        parse_recipe(changed("model.window_size", value), "r.yaml")


def test_transformer_engine_gathers_for_windows_under_context_parallelism(file):
    recipe = load_recipe(file, ["model.window_size=64", "parallel.context_parallel_size=2"])
    for platform, gathers in (("te", True), ("cpu", False)):
        flags = megatron_flags(recipe, recipe.segment_after(0), vocab_size=1000, platform=platform)
        assert ("--cp-comm-type" in flags) == gathers


def test_flags_carry_the_recipe(file):
    recipe = load_recipe(file)
    flags = megatron_flags(recipe, recipe.segment_after(0), vocab_size=1000, platform="cpu")
    pairs = dict(zip(flags, flags[1:], strict=False))
    assert pairs["--train-iters"] == "10"
    assert pairs["--vocab-size"] == "1000"
    assert pairs["--num-query-groups"] == "4"
    assert "--calculate-per-token-loss" in flags
    assert pairs["--eval-iters"] == "16"
    assert pairs["--distributed-backend"] == "gloo"
    assert "gloo" not in megatron_flags(recipe, recipe.segment_after(0), vocab_size=1000, platform="te")
