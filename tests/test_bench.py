"""`mlmclm bench` and the table of its results. What the figures are is not tested: this machine has other work."""

import json
import math
import subprocess
import sys

import pytest

from megatron_mlmclm import bench
from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.errors import UserError
from tests.conftest import ROOT

KEYS = {"case", "ours", "peer", "unit", "ratio", "ratio_min", "ratio_max"}
TABLE = ROOT / "tools" / "bench" / "table.py"


def table(*paths) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TABLE), *map(str, paths)], capture_output=True, text=True)


def test_a_bench_writes_what_the_table_reads(tmp_path):
    path = tmp_path / "masking.json"
    small = ["--rounds", "2", "--sequences", "2", "--length", "64", "--vocabulary", "500"]
    assert dispatch(["bench", "masking", "--json", str(path), *small]) == 0
    results = json.loads(path.read_text())
    assert len(results) == 10
    for result in results:
        assert set(result) == KEYS and result["unit"] == "Mtok/s"
        assert 0 < result["ratio_min"] <= result["ratio"] <= result["ratio_max"] < math.inf
    shown = table(path, path)
    assert shown.returncode == 0
    rows = shown.stdout.splitlines()
    assert len(rows) == 2 + 2 * len(results)
    assert all(row.startswith("| ") and row.count("|") == 7 for row in rows)
    assert rows[2].startswith("| MLM batch 30%, collator (torch), lists | ") and rows[2].endswith(" | higher |")


def test_the_table_refuses_other_files(tmp_path):
    for content in ("{", "3", '[{"case": 1}]'):
        (tmp_path / "other.json").write_text(content)
        done = table(tmp_path / "other.json")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert table(tmp_path / "none.json").returncode == 2


def test_names(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no bench 'speed'; there are: masking"):
        bench.script_of("speed", {"masking": tmp_path})
    with pytest.raises(UserError, match="bench loader is not in this checkout, which has: masking"):
        bench.script_of("loader", {"masking": tmp_path})
    with pytest.raises(UserError, match="name it: "):
        dispatch(["bench", "--rounds=1"])
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    with pytest.raises(UserError, match="checkout"):
        dispatch(["bench"])


def test_all_that_are_there_run_and_one_list_holds_their_results(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "tools" / "bench"
    folder.mkdir(parents=True)
    write = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('[{}]')"
    for name, script in (("step", write), ("loss_memory", write), ("loop", "raise SystemExit(2)"), ("table", "1/0")):
        (folder / f"{name}.py").write_text(script)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert dispatch(["bench", "--json", str(tmp_path / "all.json")]) == 0
    assert json.loads((tmp_path / "all.json").read_text()) == [{}, {}]
    said = capfd.readouterr().out
    assert "cannot run here: loop\n" in said
    assert "not in this checkout: masking, startup," in said
    (folder / "loader.py").write_text("1/0")
    assert dispatch(["bench"]) == 1
    assert "failed: loader" in capfd.readouterr().out
