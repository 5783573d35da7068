"""The doctor judges facts; here it is fed facts of machines that are not at hand."""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest

from megatron_mlmclm.platform import doctor
from megatron_mlmclm.platform.doctor import Device, Facts, Trap, choose_parts, find_traps

GOOD = Facts(
    python="3.12.1",
    versions={
        "torch": "2.14.1",
        "megatron-core": "0.19.2",
        "transformers": "5.24.0",
        "tensorboard": "2.20.0",
        "psutil": "7.0.0",
    },
    tested={"torch": "<2.15,>=2.14"},
    cores=16,
)
H100 = Device("NVIDIA H100 80GB HBM3", 79.1, True)


def with_versions(**versions: str | None) -> Facts:
    return replace(GOOD, versions=GOOD.versions | {name.replace("_", "-"): value for name, value in versions.items()})


def only_trap(facts: Facts) -> Trap:
    (trap,) = find_traps(facts)
    assert "\n" not in trap.text
    return trap


def test_a_good_machine_has_no_trap():
    assert find_traps(GOOD) == []
    assert find_traps(replace(GOOD, devices=(H100,), has_te=True)) == []


@pytest.mark.parametrize(
    ("facts", "word", "fatal"),
    [
        (replace(GOOD, python="3.11.7"), "3.12", True),
        (with_versions(megatron_core=None), "megatron-core is not installed", True),
        (replace(GOOD, torch_error="OSError: libcudart.so.13"), "libcudart", True),
        (with_versions(psutil=None), "pip install psutil", True),
        (with_versions(tensorboard=None), "pip install tensorboard", False),
        (with_versions(torch="2.13.0"), "pip install 'torch<2.15,>=2.14'", False),
        (with_versions(apex="0.9.10.dev0"), "pip uninstall apex", False),
        (with_versions(nvidia_resiliency_ext="0.4.1"), "pip uninstall nvidia-resiliency-ext", True),
        (replace(GOOD, has_te=True), "hides it", False),
        (replace(GOOD, processes=4), "export OMP_NUM_THREADS=4", False),
    ],
)
def test_each_trap_is_one_line_with_its_mend(facts: Facts, word: str, fatal: bool):
    trap = only_trap(facts)
    assert word in trap.text
    assert trap.fatal is fatal


@pytest.mark.parametrize(
    "facts",
    [
        replace(with_versions(apex="0.1"), apex_is_nvidia=True, devices=(H100,)),
        with_versions(nvidia_resiliency_ext="0.6.0"),
        with_versions(torch="2.14.1+cu130"),
        replace(GOOD, processes=4, omp_num_threads="4"),
    ],
)
def test_the_harmless_neighbours_are_no_traps(facts: Facts):
    assert find_traps(facts) == []


def test_fatal_traps_come_first():
    facts = replace(with_versions(tensorboard=None), python="3.10.0")
    assert [trap.fatal for trap in find_traps(facts)] == [True, False]


def test_parts_follow_the_machine():
    cpu = choose_parts(replace(GOOD, has_te=True))
    assert cpu["platform"] == "CPU, gloo"
    assert "scaled_dot_product" in cpu["attention"]
    assert "CPU Adam" in cpu["optimizer"]
    gpu = choose_parts(replace(GOOD, devices=(H100,), has_te=True))
    assert "NCCL" in gpu["platform"]
    assert gpu["attention"] == "Transformer Engine"
    assert "Transformer Engine" in gpu["optimizer"]
    bare = choose_parts(replace(GOOD, devices=(H100,)))
    assert bare["optimizer"] == "torch AdamW"
    assert "apex" in choose_parts(replace(GOOD, devices=(H100,), apex_is_nvidia=True))["optimizer"]


def test_bf16_instructions_prefer_the_fastest():
    assert doctor.bf16_instructions({"avx512_bf16", "amx_bf16"}) == "amx_bf16"
    assert doctor.bf16_instructions({"sse4_2"}) is None


def test_resiliency_rule_is_megatrons():
    (source,) = (f for f in metadata.files("megatron-core") or [] if str(f).endswith("strategies/nvrx.py"))
    assert re.search(r'NVRX_MIN_VERSION = "([^"]+)"', source.read_text()).group(1) == doctor.RESILIENCY_MIN


def test_runs_here_without_importing_megatron():
    code = (
        "import sys; from megatron_mlmclm.cli import dispatch; status = dispatch(['doctor', '--json']);"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('megatron', 'transformer_engine', 'apex')];"
        "sys.exit(status)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert result.returncode == int(any(trap["fatal"] for trap in facts["traps"])), result.stderr


def test_table_and_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    broken = replace(GOOD, python="3.11.2", devices=(H100, H100))
    monkeypatch.setattr(doctor, "collect_facts", lambda processes: broken)
    assert doctor.run(argparse.Namespace(json=False, processes=None)) == 1
    out = capsys.readouterr().out
    assert "H100" in out
    assert "fatal: Python 3.11.2" in out
