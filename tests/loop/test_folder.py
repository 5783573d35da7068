"""What may change between a run and its resumption."""

import pytest
import yaml

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.folder import check_resumable
from megatron_mlmclm.recipe import dump_recipe, parse_recipe
from tests.recipe.test_recipe import VALUES


@pytest.fixture
def saved(tmp_path):
    """A run folder with a checkpoint; returns a maker of changed recipes for it."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")

    def make(**changes):
        values = yaml.safe_load(yaml.safe_dump(VALUES))
        return parse_recipe({**values, "output": str(tmp_path), **changes}, "r.yaml")

    (tmp_path / "recipe.yaml").write_text(dump_recipe(make()))
    return make


def test_layout_length_and_new_phases_may_change(saved):
    longer = [VALUES["phases"][0], {**VALUES["phases"][1], "steps": 9}, {"objective": "clm", "steps": 1}]
    check_resumable(saved())
    check_resumable(saved(phases=longer, parallel={"tensor_model_parallel_size": 2}, log_interval=3))
    check_resumable(saved(phases=longer, optimizer={"lr": 1e-3, "decay_steps": 5}))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 2}, "seed"),
        ({"model": {**VALUES["model"], "hidden_size": 128}}, "model.hidden_size"),
        ({"data": {**VALUES["data"], "train": "data/c"}}, "data.train"),
        ({"data": {**VALUES["data"], "packing": "documents"}}, "data.packing"),
        ({"batch": {"micro_batch_size": 2, "global_batch_size": 16}}, "batch.global_batch_size"),
        ({"phases": [{"objective": "clm", "steps": 6}, VALUES["phases"][1]]}, "phases.0.steps"),
        ({"phases": VALUES["phases"][:1]}, "phases.1"),
        ({"optimizer": {"lr": 2e-3}}, "optimizer.lr"),
        ({"parallel": {"use_distributed_optimizer": False}}, "parallel.use_distributed_optimizer"),
        ({"optimizer": {"lr": 1e-3, "adam_beta2": 0.98}}, "optimizer.adam_beta2"),
    ],
)
def test_what_would_make_it_another_run_is_refused(saved, change, key):
    with pytest.raises(UserError, match=f"{key} = .* give another output"):
        check_resumable(saved(**change))
