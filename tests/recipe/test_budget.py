"""Costs against figures computed by hand, and lengths cut to another recipe's budget."""

import numpy as np
import pytest
import yaml

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Ramp, Steps
from megatron_mlmclm.recipe import dump_recipe, load_recipe, parse_recipe
from megatron_mlmclm.recipe.budget import KINDS, _shares, phase_cost, ratios, recipe_cost, settled, turns
from megatron_mlmclm.recipe.phase import PhaseSection, RatioSchedule

# 1,320 weights besides embedding and head: 7,920 FLOPs a token; scores 1,920 a token; the head 4,800 a predicted token.
ROWS = 100
VALUES = {
    "name": "small",
    "output": "runs/small",
    "model": {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "seq_length": 10},
    "data": {"tokenizer": "tok", "train": "data/a"},
    "batch": {"micro_batch_size": 1, "global_batch_size": 4},  # 40 tokens a step
    "phases": [{"objective": "mlm", "steps": 10, "mask_ratio": 0.4}],
    "optimizer": {"lr": 1e-3},
}
CLM = {"objective": "clm"}
MLM = {"objective": "mlm", "mask_ratio": 0.4}
FALLING = {"start": 0.5, "end": 0.1}


def recipe_of(*phases, **others):
    return parse_recipe({**VALUES, "phases": list(phases), **others}, "r.yaml")


def parts(key, *pairs):
    return [{**part, key: number} for part, number in pairs]


@pytest.mark.parametrize(
    ("phase", "tokens", "predicted", "flops"),
    [
        ({**CLM, "steps": 10}, 400, 400, 400 * (7920 + 960) + 400 * 4800),
        ({**MLM, "steps": 10}, 400, 160, 400 * (7920 + 1920) + 160 * 4800),
        ({**MLM, "objective": "mntp", "steps": 10}, 400, 160, 400 * (7920 + 1920) + 160 * 4800),
        ({**MLM, "attention": "causal", "steps": 10}, 400, 160, 400 * (7920 + 960) + 160 * 4800),
        ({**MLM, "tokens": 401}, 440, 176, 440 * 9840 + 176 * 4800),
        ({**MLM, "samples": 9}, 120, 48, 120 * 9840 + 48 * 4800),
        (
            {**MLM, "steps": 10, "batch": {"micro_batch_size": 1, "global_batch_size": 8}},
            *(800, 320, 800 * 9840 + 320 * 4800),
        ),
        # Half of the positions on average; 1/2 (1 + mean of p^2), which is (0.04 + 0.16 + 0.64) / 3.
        (
            {**CLM, "attention": "prefix", "prefix": [0.2, 0.8], "steps": 10},
            *(400, 200, 400 * (7920 + 1920 * 0.64) + 200 * 4800),
        ),
        ({"objective": "diffusion", "mask_ratio": [0.1, 0.9], "steps": 10}, 400, 200, 400 * 9840 + 200 * 4800),
        (
            {"objective": "mixed", "parts": parts("share", (CLM, 2), (MLM, 6)), "steps": 10},
            *(400, 220, 400 * (7920 + 1920 * 0.875) + 220 * 4800),
        ),
        # clm clm mlm mlm mlm clm
        (
            {"objective": "alternating", "parts": parts("steps", (CLM, 2), (MLM, 3)), "steps": 6},
            *(240, 168, 120 * 8880 + 120 * 9840 + 168 * 4800),
        ),
        ({**MLM, "mask_ratio": FALLING, "steps": 5}, 200, 60, 200 * 9840 + 60 * 4800),
        ({**MLM, "mask_ratio": {**FALLING, "steps": 3}, "steps": 5}, 200, 44, 200 * 9840 + 44 * 4800),
        ({**MLM, "mask_ratio": {**FALLING, "shape": "cosine"}, "steps": 3}, 120, 36, 120 * 9840 + 36 * 4800),
        (
            {**MLM, "mask_ratio": {"shape": "steps", "at": {0: 0.5, 4: 0.1}}, "steps": 10},
            *(400, 104, 400 * 9840 + 104 * 4800),
        ),
        # clm, 0.4, clm, 0.2, clm: the schedule runs over the phase's steps, whoever's turn it is
        (
            {
                "objective": "alternating",
                "parts": parts("steps", (CLM, 1), ({**MLM, "mask_ratio": FALLING}, 1)),
                "steps": 5,
            },
            *(200, 144, 120 * 8880 + 80 * 9840 + 144 * 4800),
        ),
    ],
)
def test_costs_are_those_counted_by_hand(phase, tokens, predicted, flops):
    cost = recipe_cost(recipe_of(phase), ROWS)
    assert [cost.of(kind) for kind in KINDS] == pytest.approx([tokens, predicted, flops])


def test_a_prefix_sees_what_counting_pairs_says():
    positions, low, high = 200, 0.1, 0.6
    seen = []
    for prefix in range(round(low * positions), round(high * positions) + 1):
        row, column = np.indices((positions, positions))
        seen.append(((column <= row) | (column < prefix)).mean())
    phase = {**CLM, "attention": "prefix", "prefix": [low, high], "steps": 10}
    cost = recipe_cost(recipe_of(phase), ROWS)
    scores = cost.flops - cost.tokens * 7920 - cost.predicted * 4800
    assert scores / (cost.tokens * 1920) == pytest.approx(np.mean(seen), abs=0.005)


def test_the_beginning_of_a_phase_costs_its_own_steps():
    recipe = recipe_of({**MLM, "mask_ratio": FALLING, "steps": 5})
    costs = [phase_cost(recipe, recipe.phases[0], 5, ROWS, until=done).predicted for done in range(1, 6)]
    assert costs == pytest.approx([20, 36, 48, 56, 60])


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_schedules_are_those_of_training(steps):
    for schedule, trained in [
        (RatioSchedule(start=0.5, end=0.1), Ramp(0.5, 0.1, steps)),
        (RatioSchedule(shape="cosine", start=0.1, end=0.3, steps=5), Ramp(0.1, 0.3, 5, "cosine")),
        (RatioSchedule(shape="steps", at={0: 0.4, 3: 0.2, 50: 0.1}), Steps({0: 0.4, 3: 0.2, 50: 0.1})),
    ]:
        assert ratios(schedule, steps) == pytest.approx([trained.at(step) for step in range(steps)])
        assert ratios(schedule, steps).mean() == pytest.approx(trained.mean(steps))


def test_turns_are_those_of_training():
    from megatron_mlmclm.phases import alternating

    phase = PhaseSection(objective="alternating", parts=parts("steps", (CLM, 3), (MLM, 1), ({**CLM, "name": "b"}, 2)))
    choose = alternating([3, 1, 2])
    assert np.argmax(turns(phase, 20), axis=0).tolist() == [choose(0, 0, step) for step in range(20)]


@pytest.fixture
def reference(tmp_path):
    path = tmp_path / "reference.yaml"
    path.write_text(yaml.safe_dump({**VALUES, "phases": [{**MLM, "steps": 1000}]}))
    return str(path)


OPEN = {
    "mlm": MLM,
    "falling": {**MLM, "mask_ratio": FALLING},
    "table": {**MLM, "mask_ratio": {"shape": "steps", "at": {0: 0.5, 100: 0.1}}},
    "alternating": {"objective": "alternating", "parts": parts("steps", (CLM, 7), (MLM, 5))},
    "mixed": {"objective": "mixed", "parts": parts("share", (CLM, 1), (MLM, 15))},
    "diffusion, own batch": {
        "objective": "diffusion",
        "mask_ratio": [0.1, 1.0],
        "batch": {"micro_batch_size": 1, "global_batch_size": 6},
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPEN)
def test_a_settled_recipe_meets_the_budget_within_half_a_step(name, kind, reference):
    recipe = recipe_of({**CLM, "steps": 100}, OPEN[name], compute={"equal": kind, "to": reference})
    whole = settled(recipe, ROWS)
    target, steps = recipe_cost(load_recipe(reference), ROWS).of(kind), whole.phases[1].steps
    one = [phase_cost(recipe, recipe.phases[1], n, ROWS).of(kind) for n in (steps - 1, steps, steps + 1)]
    assert abs(recipe_cost(whole, ROWS).of(kind) - target) <= 0.5 * max(one[1] - one[0], one[2] - one[1]) * (1 + 1e-9)
    assert whole.phases[0] == recipe.phases[0]


def test_equal_tokens_in_steps(reference):
    recipe = recipe_of({**CLM, "steps": 400}, MLM, compute={"equal": "tokens", "to": reference})
    assert settled(recipe, ROWS).phases[1].steps == 600
    predicted = recipe_of({**CLM, "steps": 399}, MLM, compute={"equal": "predicted tokens", "to": reference})
    assert settled(predicted, ROWS).phases[1].steps == 3  # (16,000 - 15,960) / 16 = 2.5


def test_nothing_to_settle_changes_nothing_and_reads_nothing(reference):
    plain = recipe_of({**MLM, "steps": 3})
    assert settled(plain, ROWS) is plain
    recipe = recipe_of(MLM, compute={"equal": "FLOPs", "to": reference})
    whole = parse_recipe(yaml.safe_load(dump_recipe(settled(recipe, ROWS)).replace(reference, "gone.yaml")), "saved")
    assert settled(whole, ROWS) is whole


def test_rows_of_another_tokenizer_are_its_own(tmp_path):
    model = {**VALUES["model"], "padded_vocab_size": 1000}
    other = {**VALUES, "model": model, "data": {"tokenizer": "other", "train": "data/a"}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**other, "phases": [{**CLM, "steps": 100}]}))
    recipe = recipe_of(CLM, compute={"equal": "FLOPs", "to": str(tmp_path / "other.yaml")})
    assert settled(recipe, ROWS).phases[0].steps == round(100 * (8880 + 48_000) / (8880 + 4800))


def test_a_budget_may_come_from_a_recipe_that_takes_its_own(tmp_path, reference):
    middle = {**VALUES, "phases": [CLM], "compute": {"equal": "predicted tokens", "to": reference}}
    (tmp_path / "middle.yaml").write_text(yaml.safe_dump(middle))
    recipe = recipe_of(MLM, compute={"equal": "tokens", "to": str(tmp_path / "middle.yaml")})
    assert settled(recipe, ROWS).phases[0].steps == 400


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (
            [{**CLM, "steps": 400}, MLM],
            "1.6e.04 predicted tokens, .* take 1.6e.04 of them: nothing is left for phases.1",
        ),
        ([MLM, {**CLM, "steps": 500}], "1.6e.04 predicted tokens, .* take 2e.04 of them: nothing is left for phases.0"),
        ([MLM, CLM], "phases.0, phases.1 have none: give steps, tokens or samples"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused(phases, message, reference):
    with pytest.raises(UserError, match=message):
        settled(recipe_of(*phases, compute={"equal": "predicted tokens", "to": reference}), ROWS)


def test_a_budget_out_of_all_proportion_is_refused():
    compute = {"equal": "FLOPs", "to": "paper/610m-mlm40-42k"}
    for phase in (MLM, OPEN["falling"]):
        with pytest.raises(UserError, match="phases.0 would need more than 16,777,216 steps"):
            settled(recipe_of(phase, compute=compute), ROWS)


def test_a_reference_is_refused_that_is_missing_endless_or_without_length(tmp_path):
    def written(name, to):
        compute = {"compute": {"equal": "tokens", "to": str(tmp_path / to)}} if to else {}
        (tmp_path / name).write_text(yaml.safe_dump({**VALUES, "phases": [MLM], **compute}))
        return load_recipe(tmp_path / name)

    with pytest.raises(UserError, match="none.yaml: cannot read the recipe"):
        settled(written("a.yaml", "none.yaml"), ROWS)
    with pytest.raises(UserError, match="a.yaml takes its budget from itself"):
        settled(written("a.yaml", "a.yaml"), ROWS)
    written("b.yaml", "a.yaml")
    with pytest.raises(UserError, match="takes its budget from itself"):
        settled(written("a.yaml", "b.yaml"), ROWS)
    written("b.yaml", None)
    with pytest.raises(UserError, match="small: phases.0 has no length"):
        settled(load_recipe(tmp_path / "a.yaml"), ROWS)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize(("window", "every"), [([2, 3], None), ([4, 0], None), ([-1, 1], None), ([3, 3], 3)])
def test_a_window_counts_the_pairs_that_it_lets_through(direction, window, every):
    """Against the pairs counted one by one: 4 layers, every third from the first without a window."""
    model = {**VALUES["model"], "num_layers": 4, "window_size": window, "global_attn_every_n_layers": every}
    phase = {"objective": "clm", "steps": 1, "attention": direction}
    each = parse_recipe({**VALUES, "model": model, "phases": [phase]}, "r.yaml")
    length, (left, right) = each.model.seq_length, window

    def pairs(windowed: bool) -> int:
        return sum(
            (direction == "bidirectional" or column <= row)
            and (not windowed or ((left < 0 or row - column <= left) and (right < 0 or column - row <= right)))
            for row in range(length)
            for column in range(length)
        )

    layers = [pairs(windowed=not every or layer % every > 0) for layer in range(each.model.num_layers)]
    expected = np.mean(layers) / length**2
    _, seen = _shares(each.phases[0], 1, each.model)
    whole = pairs(windowed=False) / length**2  # of which the arithmetic says 1/2, without the diagonal
    share = np.mean([layer % every == 0 for layer in range(each.model.num_layers)]) if every else 0.0
    correction = share * (whole - (0.5 if direction == "causal" else 1.0))
    assert float(seen.mean()) == pytest.approx(expected - correction)
