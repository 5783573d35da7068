"""The worlds that the parallel tests read: each is started once a session and trains many cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


# 4 layers, GQA 4/2, SwiGLU; the switches are after steps 8 and 14 of 20.
RECIPE = """
name: layouts
output: set-by-case
seed: 77
model:
  {{num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2, seq_length: 32}}
data: {{tokenizer: {tokenizer}, train: {train}, valid: {valid}}}
batch: {{micro_batch_size: 2, global_batch_size: 8}}
phases:
  - {{objective: clm, steps: 8}}
  - {{objective: mlm, steps: 6, mask_ratio: 0.4}}
  - objective: mntp
    steps: 6
    mask_ratio: 0.3
    corruption: {{mask: 0.8, random: 0.1, keep: 0.1, selection: exact}}
optimizer: {{lr: 3.0e-3, warmup_steps: 3, decay_steps: 4}}
validation: {{interval: 10, samples: 16, objectives: [clm, mlm, mntp]}}
save_interval: 20
"""
TP2 = "parallel.tensor_model_parallel_size=2"
PP2 = "parallel.pipeline_model_parallel_size=2"
SP = "parallel.sequence_parallel=true"
VPP2 = "parallel.num_virtual_stages_per_pipeline_rank=2"
PLAIN = "parallel.use_distributed_optimizer=false"
OFTEN = "save_interval=4"
TIED = "model.tie_embeddings=true"


class Worlds:
    """Run folders of every case, by name."""

    def __init__(self, folder: Path, corpus) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE.format(tokenizer=corpus.tokenizer, train=corpus.train, valid=corpus.valid))

    def case(self, name: str, *extra: str, probes: tuple[str, ...] = (), resume: tuple[str, int] | None = None) -> dict:
        case = {"recipe": str(self.recipe), "extra": [f"output={self.folder / name}", *extra], "probes": probes}
        if resume:
            case["resume"] = [str(self.folder / resume[0]), resume[1]]
        return case

    def start(self, processes: int, cases: list[dict]) -> None:
        """Run the cases in one world of `processes`; on failure show what the ranks said."""
        file, logs = self.folder / f"cases_{processes}.json", self.folder / f"world_{processes}"
        file.write_text(json.dumps(cases))
        logs.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        command = [*torchrun, str(ROOT / "tests" / "parallel" / "world.py"), str(file), str(logs)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-6000:]

    def metrics(self, name: str, kind: str = "train") -> list[dict]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self.metrics(name)]

    def gradients(self, name: str, step: int) -> dict[tuple, torch.Tensor]:
        """Full gradients by (global name, layer), put together from every rank's shards."""
        full: dict[tuple, torch.Tensor] = {}
        for file in sorted((self.folder / name).glob(f"gradients_{step}_*.pt")):
            for key, offset, shape, data in torch.load(file):
                whole = full.setdefault(key, torch.zeros(shape))
                whole[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
        return full


@pytest.fixture(scope="session")
def worlds(corpus, tmp_path_factory) -> Worlds:
    """Worlds of 1, 2 and 4 processes."""
    worlds = Worlds(tmp_path_factory.mktemp("worlds"), corpus)
    case = worlds.case
    all_probes = ("gradients", "perturbation", "logits", "head")
    worlds.start(
        1,
        [
            case("tp1", PLAIN, OFTEN, probes=all_probes),
            *(case(f"tp1-from-{step}", PLAIN, resume=("tp1", step)) for step in (4, 8, 12)),
            case("micro-1-workers-2", "batch.micro_batch_size=1", "data.num_workers=2"),
            case("tied-tp1", TIED, probes=("gradients", "logits")),
        ],
    )
    worlds.start(
        2,
        [
            case("dp2", OFTEN),
            *(case(f"dp2-from-{step}", resume=("dp2", step)) for step in (4, 8, 12)),
            case("dp2-plain", PLAIN, probes=("gradients",)),
            case("tp2", TP2, probes=all_probes),
            case("tp2-plain", TP2, PLAIN),
            case("tp2-sp", TP2, SP, probes=all_probes),
            case("pp2", PP2, probes=("gradients",)),
            case("pp2-plain", PP2, PLAIN),
            case("pp2-vpp2", PP2, VPP2, probes=("gradients",)),
            case("tied-pp2", PP2, TIED, probes=("gradients",)),
            case("dp2-to-tp2-sp", TP2, SP, resume=("dp2", 4)),
            case("dp2-to-pp2", PP2, resume=("dp2", 8)),
            case("dp2-to-tp2", TP2, resume=("dp2", 12)),
        ],
    )
    worlds.start(
        4,
        [
            case("tp2-pp2", TP2, PP2, SP, probes=("gradients",)),
            case("tied-tp2-pp2", TP2, PP2, SP, TIED, probes=("gradients",)),
            case("dp2-to-tp2-pp2", TP2, PP2, resume=("dp2", 8)),
        ],
    )
    return worlds
