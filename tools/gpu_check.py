"""The GPU check (see gpu_check.sh): what the machine has, GPU losses against CPU losses, speed and memory at 210M."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_mlmclm.errors import UserError, run_cleanly

ROOT = Path(__file__).resolve().parent.parent
MLMCLM = [sys.executable, "-m", "megatron_mlmclm.cli"]
# fp32 without TF32: what is left are the orders of summation of two kinds of kernels.
TOLERANCE = 1e-3
QUICKSTART = ROOT / "examples" / "quickstart" / "recipe.yaml"
# The first 20 steps, with the switch in the middle of them; nothing is saved or validated before the end.
LOSSES = ["phases.0.steps=10", "phases.1.steps=10", "optimizer.warmup_steps=5", "optimizer.decay_steps=5"]
# Without Transformer Engine or apex a distributed optimizer's checkpoint would not load, so a run refuses it.
ONE_PROCESS = [
    *("parallel.tensor_model_parallel_size=1", "parallel.use_distributed_optimizer=false"),
    *("validation.interval=1000", "validation.samples=8"),
]
# examples/210m: its shape, with Llama 3's 128,256 rows in embedding and head.
SHAPE_210M = (
    "model={num_layers: 12, hidden_size: 768, ffn_hidden_size: 3072, num_attention_heads: 12, seq_length: 2048,"
    " padded_vocab_size: 128256}"
)
SPEED = [
    *("precision=bf16", "batch={micro_batch_size: 8, global_batch_size: 16}", "validation.samples=16"),
    *("phases=[{objective: mlm, steps: 20, mask_ratio: 0.4}]", "optimizer.warmup_steps=5", "optimizer.decay_steps=5"),
]
TINY = "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, seq_length: 128}"


def main() -> int:
    """Run the check; exit status 1 when the losses differ by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh")
    parser.add_argument("output", nargs="?", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU with tiny shapes")
    args = parser.parse_args()
    if not args.rehearse and not cuda_is_here():
        raise UserError("no CUDA device here; `tools/gpu_check.sh --rehearse` runs the same steps on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found = {"rehearsal": args.rehearse, "doctor": doctor()}
        make_data(work)
        found["losses"] = compare_losses(work, "cpu" if args.rehearse else "gpu")
        found["speed"] = measure_speed(work, args.rehearse)
    args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    show(found)
    return int(found["losses"]["largest_relative_difference"] > TOLERANCE)


def cuda_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


def run(*command: str, device: str = "gpu") -> str:
    """Run a command of ours; `device` "cpu" hides the GPU from it. Its output is shown when it fails."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    done = subprocess.run(command, env={**os.environ, **hidden}, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-8000:], sep="\n", file=sys.stderr)
        raise UserError(f"{' '.join(command[1:5])} ... ended with status {done.returncode}; its last lines are above")
    return done.stdout


def doctor() -> dict[str, Any]:
    """The facts that `mlmclm doctor` finds."""
    return json.loads(run(*MLMCLM, "doctor", "--json"))


def make_data(work: Path) -> None:
    """Index real text that is always here: this repository's own sources and pages, a document a file."""
    files = sorted(path for pattern in ("*.py", "*.md", "LICENSE") for path in ROOT.glob(f"**/{pattern}"))
    texts = [path.read_text(encoding="utf-8") for path in files if ".venv" not in path.parts]
    (work / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    run(*MLMCLM, "tokenizer", "train", f"{work}/text.jsonl", "--vocab-size", "4096", "--output", f"{work}/tokenizer")
    run(*MLMCLM, "preprocess", f"{work}/text.jsonl", "--tokenizer", f"{work}/tokenizer", "--output", f"{work}/data")


def train(work: Path, name: str, device: str, *overrides: str) -> list[dict[str, Any]]:
    """Train the quickstart's recipe with `overrides` on one process; the training records of its metrics."""
    output = work / name
    data = [f"data.tokenizer={work}/tokenizer", f"data.train={work}/data", f"data.valid={work}/data"]
    run(*MLMCLM, "train", str(QUICKSTART), f"output={output}", *data, *ONE_PROCESS, *overrides, device=device)
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def compare_losses(work: Path, device: str) -> dict[str, Any]:
    """Twenty steps of the quickstart, ten on either side of the switch, here and on the CPU."""
    here = [record["loss"] for record in train(work, "losses-here", device, *LOSSES)]
    cpu = [record["loss"] for record in train(work, "losses-cpu", "cpu", *LOSSES)]
    largest = max(abs(a - b) / abs(b) for a, b in zip(here, cpu, strict=True))
    return {"here": here, "cpu": cpu, "largest_relative_difference": largest}


def measure_speed(work: Path, rehearse: bool) -> dict[str, Any]:
    """210M in bf16 with masked LM at 40 %: median tokens/s of the last ten steps, peak memory of the process."""
    device, shape = ("cpu", TINY) if rehearse else ("gpu", SHAPE_210M)
    records = train(work, "speed", device, *SPEED, shape)
    return {
        "shape": shape.removeprefix("model="),
        "tokens_per_s": median(record["tokens_per_s"] for record in records[-10:]),
        "peak_memory_gib": records[-1]["peak_memory_gib"],
        "first_loss": records[0]["loss"],
        "last_loss": records[-1]["loss"],
    }


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    devices, versions = found["doctor"]["devices"], found["doctor"]["versions"]
    losses, speed, rehearsal = found["losses"], found["speed"], found["rehearsal"]
    difference = f"{losses['largest_relative_difference']:.1e} relative, {TOLERANCE} allowed"
    table = Table(title="GPU check (rehearsal on a CPU)" if rehearsal else "GPU check", show_header=False)
    table.add_row("device", devices[0]["name"] if devices else "none")
    table.add_row("torch, megatron-core", f"{versions['torch']}, {versions['megatron-core']}")
    table.add_row("loss, step 1 and 20", f"{losses['here'][0]:.5f}, {losses['here'][-1]:.5f}")
    table.add_row("largest difference to the CPU", difference)
    table.add_row("tiny shape, bf16" if rehearsal else "210M, bf16", f"{speed['tokens_per_s']:,.0f} tokens/s")
    table.add_row("peak memory", f"{speed['peak_memory_gib']:.1f} GiB")
    Console().print(table)


if __name__ == "__main__":
    run_cleanly(main)
