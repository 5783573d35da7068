"""`mlmclm train` as a user sees it: a quiet terminal, and a killed run that goes on as if nothing had been."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_mlmclm.recipe import load_recipe
from megatron_mlmclm.study import plan
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

RECIPE = """
name: small
output: whole
model: {{num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, seq_length: 32}}
data: {{tokenizer: {tokenizer}, train: {train}, valid: {valid}}}
batch: {{micro_batch_size: 2, global_batch_size: 4}}
phases: [{{objective: clm, steps: 20}}, {{objective: mlm, steps: 20, mask_ratio: 0.4}}]
optimizer: {{lr: 1.0e-3, warmup_steps: 2}}
parallel: {{tensor_model_parallel_size: 2}}
validation: {{interval: 20, samples: 8}}
save_interval: 6
"""
COMMAND = [sys.executable, "-m", "megatron_mlmclm.cli", "train", "r.yaml", "--nproc", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
LINE = re.compile(
    r" +(clm|mlm)  step \d+/40  loss \d+\.\d+  lr \d\.\d+e-\d\d  [\d,]+ tokens/s  MFU \d+%  \d:\d\d:\d\d left"
)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """An unbroken run of 40 steps: (folder it ran in, what it said)."""
    work = tmp_path_factory.mktemp("train")
    recipe = RECIPE.format(tokenizer=corpus.tokenizer, train=corpus.train, valid=corpus.valid)
    (work / "r.yaml").write_text(recipe)
    done = subprocess.run(COMMAND, cwd=work, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return work, done


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_the_terminal_is_ours(whole):
    _, done = whole
    assert done.stderr == ""
    after_recipe = done.stdout.partition("\n\n")[2].splitlines()
    assert sum(bool(LINE.fullmatch(line)) for line in after_recipe) == 4  # log_interval is 10
    assert [line for line in after_recipe if line.startswith("phase")] == [
        "phase 0: clm, attention causal, from step 1",
        "phase 1: mlm, attention bidirectional, from step 21",
    ]
    heads = [line for line in after_recipe if line.startswith("head")]
    assert heads == [f"head of phase {phase}: up to 64 of 64 positions x 512, chunked" for phase in (0, 1)]
    assert len(after_recipe) == 11  # beside those: two validations and where the run is


def test_mfu_follows_from_the_speed_and_what_the_phase_costs(whole):
    """A token of the CLM phase is all predicted, under half the attention; the ceiling is one of the whole run."""
    work, _ = whole
    records = map(json.loads, (work / "whole" / "metrics.jsonl").read_text().splitlines())
    shares = {"clm": [], "mlm": []}
    for record in records:
        if record["kind"] == "train":
            shares[record["objective"]].append(record["mfu"] / record["tokens_per_s"])
    phases = plan(load_recipe(str(work / "whole" / "recipe.yaml"))).phases
    costs = [phase.cost.flops / phase.cost.tokens for phase in phases]
    clm, mlm = shares.values()
    assert clm == pytest.approx([clm[0]] * 20) and mlm == pytest.approx([mlm[0]] * 20)
    assert clm[0] / mlm[0] == pytest.approx(costs[0] / costs[1])
    assert clm[0] > 0


def test_another_batch_size_is_still_one_run(whole, corpus):
    """Megatron fixes it for the life of a process: the ranks begin anew at the edge, and nobody need notice."""
    work, _ = whole
    smaller = "phases.1.batch={micro_batch_size: 1, global_batch_size: 2}"
    command = [*COMMAND, "output=smaller", smaller, "data.num_workers=1"]
    done = subprocess.run(command, cwd=work, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("name: small\n") == 1
    assert [line.partition(",")[0] for line in done.stdout.splitlines() if line.startswith("phase ")] == [
        "phase 0: clm",
        "phase 1: mlm",
    ]
    records = list(map(json.loads, (work / "smaller" / "metrics.jsonl").read_text().splitlines()))
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == list(range(1, 41))
    assert [record["samples"] for record in trained[18:23]] == [76, 80, 82, 84, 86]
    assert losses(work / "smaller")[:20] == losses(work / "whole")[:20]


def test_what_megatron_says_is_in_the_logs(whole):
    work, _ = whole
    assert "iteration       40/      40" in (work / "whole" / "logs" / "rank_1.log").read_text()
    assert "saving checkpoint" in (work / "whole" / "logs" / "rank_0.log").read_text()


def test_tensorboard_is_written(whole):
    work, _ = whole
    events = EventAccumulator(str(work / "whole" / "tensorboard"))
    events.Reload()
    assert {"clm loss", "mlm loss", "learning-rate", "mlm loss validation"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("clm loss")][:20] == list(range(1, 21))


def test_a_killed_run_goes_on_bit_for_bit(whole):
    work, _ = whole
    started = subprocess.Popen(
        [*COMMAND, "output=killed"], cwd=work, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not (work / "killed" / "metrics.jsonl").exists() or len(losses_so_far(work / "killed")) < 14:
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    time.sleep(2)
    reached = len(losses_so_far(work / "killed"))
    time.sleep(3)
    assert len(losses_so_far(work / "killed")) == reached < 40  # its ranks are gone, too
    again = [*COMMAND, "output=killed"]
    done = subprocess.run(again, cwd=work, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert losses(work / "killed") == losses(work / "whole")


def losses_so_far(run: Path) -> list[str]:
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
