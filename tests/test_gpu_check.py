"""The GPU check's own steps, rehearsed on a CPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = ["bash", str(ROOT / "tools" / "gpu_check.sh")]
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_the_rehearsal_compares_and_measures(tmp_path):
    output = tmp_path / "found.json"
    done = subprocess.run(
        [*SCRIPT, "--rehearse", output], env=ENVIRONMENT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(output.read_text())
    assert len(found["losses"]["here"]) == 20
    assert found["losses"]["here"] == found["losses"]["cpu"]
    assert found["speed"]["tokens_per_s"] > 0
    assert "GPU check" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path):
    done = subprocess.run(SCRIPT, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "--rehearse" in done.stderr
    assert list(tmp_path.iterdir()) == []
