"""Reset, hyperparameters and freezing on Megatron's own optimizers, as tests/parallel/optimizer_world.py finds them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FORMS = [
    "plain-fp32",
    "plain-bf16",
    "distributed-fp32",
    "distributed-bf16",
    "plain-fp32-torch",
    "plain-bf16-torch",
    "distributed-bf16-torch",
    "distributed-bf16-tied",
    "distributed-bf16-overlap",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, dict[str, bool]]]:
    """What held on each of two ranks: {form: {check: held}}."""
    folder = tmp_path_factory.mktemp("optimizer")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(ROOT / "tests" / "parallel" / "optimizer_world.py"), str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_optimizer(ranks, form):
    for held in ranks:
        assert len(held[form]) >= 20
        assert [check for check, ok in held[form].items() if not ok] == []


@pytest.mark.slow
def test_every_form_is_looked_at(ranks):
    assert [*ranks[0]] == [*FORMS, "pipeline"]


@pytest.mark.slow
def test_layers_are_named_over_pipeline_stages(ranks):
    for held in ranks:
        assert set(held["pipeline"].values()) == {True}
        assert len(held["pipeline"]) == 2
