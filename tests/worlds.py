"""The worlds that the parallel tests read: each is started once a session and trains many cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.convert import import_hf
from megatron_mlmclm.data import Tokenizer
from tests.hf_models import LONG, MODELS, make

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
# Five phases of four steps; the tests resume inside each.
FIVE = """
name: five
output: set-by-case
seed: 78
model:
  {{num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2, seq_length: 32}}
data: {{tokenizer: {tokenizer}, train: {train}, valid: {valid}}}
batch: {{micro_batch_size: 2, global_batch_size: 8}}
phases:
  - {{objective: clm, steps: 4}}
  - {{objective: mlm, steps: 4, mask_ratio: 0.4, freeze: [embedding, layers.0-1]}}
  - {{objective: mntp, steps: 4, mask_ratio: 0.3, optimizer: reset}}
  - objective: mixed
    steps: 4
    parts: [{{objective: clm, share: 1}}, {{objective: mntp, share: 2, mask_ratio: 0.3}}]
  - {{objective: mlm, steps: 4, mask_ratio: 0.15, lr: {{decay_steps: 4, shape: 1-sqrt, end: 0.1}}}}
optimizer: {{lr: 3.0e-3}}
validation: {{interval: 10, samples: 8, objectives: [clm, mlm], pseudo_perplexity: 1}}
save_interval: 2
"""
# What FIVE leaves out of objectives, corruption and batches; two steps a phase.
EVERY = """
name: every
output: set-by-case
seed: 79
model:
  {{num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2, seq_length: 32}}
data: {{tokenizer: {tokenizer}, train: {train}, valid: {valid}}}
batch: {{micro_batch_size: 2, global_batch_size: 8}}
phases:
  - {{objective: clm, steps: 2, attention: prefix, prefix: [0.2, 0.8]}}
  - {{objective: diffusion, steps: 2, mask_ratio: [0.1, 1.0], weight: inverse_ratio}}
  - {{objective: mlm, steps: 2, mask_ratio: {{start: 0.5, end: 0.2}}, corruption: {{selection: words}}}}
  - {{objective: mlm, steps: 2, mask_ratio: 0.3, corruption: {{mask: 0.8, random: 0.1, keep: 0.1, selection: spans}}}}
  - objective: alternating
    steps: 2
    parts: [{{objective: clm, steps: 1}}, {{objective: mlm, steps: 1, mask_ratio: 0.3}}]
  - objective: mixed
    by: batches
    steps: 2
    parts: [{{objective: clm, share: 1}}, {{objective: mntp, share: 1, mask_ratio: 0.3}}]
  - objective: mixed
    steps: 2
    parts:
      - {{objective: clm, share: 1}}
      - {{objective: diffusion, share: 1, mask_ratio: [0.1, 0.5], weight: inverse_ratio}}
      - {{objective: clm, share: 1, name: prefix, attention: prefix, prefix: [0.2, 0.8]}}
  - {{objective: clm, steps: 2, data: replay, batch: {{micro_batch_size: 4, global_batch_size: 16}}}}
  - {{objective: mlm, steps: 2, mask_ratio: 0.3, data: {valid}, attention: causal}}
optimizer: {{lr: 3.0e-3}}
validation: {{interval: 100, samples: 16}}
"""
# Each direction in turn; the tests add documents or a window.
ATTENTION = """
name: attention
output: set-by-case
seed: 80
model:
  {{num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2, seq_length: 32}}
data: {{tokenizer: {tokenizer}, train: {train}, valid: {valid}}}
batch: {{micro_batch_size: 2, global_batch_size: 8}}
phases:
  - {{objective: clm, steps: 2}}
  - {{objective: mlm, steps: 2, mask_ratio: 0.4}}
  - {{objective: clm, steps: 2, name: prefix, attention: prefix, prefix: [0.2, 0.8]}}
optimizer: {{lr: 3.0e-3}}
validation: {{interval: 6, samples: 8}}
parallel: {{use_distributed_optimizer: false}}
"""
# A start from a Hugging Face model that no step changes: what is compared are the weights that came in.
STARTED = """
name: started
output: set-by-case
model: {{seq_length: 32}}
data: {{tokenizer: {tokenizer}, train: {train}}}
batch: {{micro_batch_size: 1, global_batch_size: 1}}
phases: [{{objective: clm, steps: 1}}]
optimizer: {{lr: 1.0e-300}}
"""
TP2 = "parallel.tensor_model_parallel_size=2"
PP2 = "parallel.pipeline_model_parallel_size=2"
CP2 = "parallel.context_parallel_size=2"
CP4 = "parallel.context_parallel_size=4"
SP = "parallel.sequence_parallel=true"
VPP2 = "parallel.num_virtual_stages_per_pipeline_rank=2"
PLAIN = "parallel.use_distributed_optimizer=false"
CHUNKED, DENSE = "head=chunked", "head=dense"  # the others have the logits of predicted positions whole
OFTEN = "save_interval=4"
TIED = "model.tie_embeddings=true"
WINDOW = (
    "model.window_size=[5, 3]",
    "model.global_attn_every_n_layers=3",
    "phases=[{objective: clm, steps: 2}, {objective: mlm, steps: 2, mask_ratio: 0.4}]",
    "validation.interval=4",
)
LAYOUTS = {"tp1": "batch.global_batch_size=2", "tp2": TP2, "pp2": PP2}  # of two processes
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


class Worlds:
    """Run folders of every case, by name."""

    def __init__(self, folder: Path, corpus) -> None:
        self.folder = folder
        texts = {"layouts": RECIPE, "five": FIVE, "every": EVERY, "attention": ATTENTION, "started": STARTED}
        for name, text in texts.items():
            filled = text.format(tokenizer=corpus.tokenizer, train=corpus.train, valid=corpus.valid)
            (folder / f"{name}.yaml").write_text(filled)
        self.recipe = folder / "layouts.yaml"
        self.short = self._short_documents(corpus)

    def _short_documents(self, corpus) -> str:
        """Indexed sentences of 13 to 15 tokens, two of which fill a sample all but some padding, and their plan."""
        speeches = map(json.loads, (corpus.folder / "train.jsonl").read_text().splitlines())
        sentences = [part for speech in speeches for part in speech["text"].split(". ") if part.strip()]
        lengths = map(len, Tokenizer.load(corpus.tokenizer).encode_batch(sentences))
        sentences = [part for part, length in zip(sentences, lengths, strict=True) if 12 <= length <= 14]
        source, prefix = self.folder / "short.jsonl", str(self.folder / "short")
        source.write_text("".join(json.dumps({"text": part}) + "\n" for part in sentences))
        dispatch(["preprocess", str(source), "--tokenizer", corpus.tokenizer, "--output", prefix, "--workers", "1"])
        dispatch(["pack", prefix, "--seq-length", "32"])
        return prefix

    def case(
        self,
        name: str,
        *extra: str,
        recipe: str = "layouts",
        probes: tuple[str, ...] = (),
        gradients: tuple[int, ...] = (1, 9),
        resume: tuple[str, int] | None = None,
    ) -> dict:
        """A run of `recipe` in the folder `name`; `resume` (run, step): as if that run had stopped after that step."""
        return {
            "recipe": str(self.folder / f"{recipe}.yaml"),
            "extra": [f"output={self.folder / name}", *extra],
            "probes": probes,
            "gradients": gradients,
            "resume": [str(self.folder / resume[0]), resume[1]] if resume else None,
        }

    def attention(self, layout: str, *extra: str, patterns: bool = False, only: tuple[str, ...] = ()) -> list[dict]:
        """Runs of ATTENTION: as it is, cut into documents, and with a window; those of `only`, if given."""
        kinds = {"attention": ((), ()), "documents": ((), ("documents",)), "window": (WINDOW, ())}
        return [
            self.case(
                f"{kind}-{layout}",
                *own,
                *extra,
                recipe="attention",
                probes=("gradients", *probes, *(("patterns",) if patterns and kind == "attention" else ())),
                gradients=(1, 2, 3, 5),
            )
            for kind, (own, probes) in kinds.items()
            if kind in (only or kinds)
        ]

    def packed(self, layout: str, *extra: str) -> list[dict]:
        """Runs of ATTENTION without its prefix phase, on real documents: blocked where they are cut, and packed."""
        data = (f"data.train={self.short}", f"data.valid={self.short}")
        phases = f"phases={json.dumps(yaml.safe_load((self.folder / 'attention.yaml').read_text())['phases'][:2])}"
        return [
            self.case(
                f"{packing}-packing-{layout}",
                *(phases, f"data.packing={packing}", *data, *extra),
                recipe="attention",
                probes=("gradients",),
                gradients=(1, 3),
            )
            for packing in ("documents", "packed")
        ]

    def start(self, processes: int, cases: list[dict]) -> None:
        """Run the cases in one world of `processes`; on failure show what the ranks said."""
        file, logs = self.folder / f"cases_{processes}.json", self.folder / f"world_{processes}"
        file.write_text(json.dumps(cases))
        logs.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        command = [*torchrun, str(ROOT / "tests" / "parallel" / "world.py"), str(file), str(logs)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr[-6000:]

    def metrics(self, name: str, kind: str = "train") -> list[dict]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self.metrics(name)]

    def gradients(self, name: str, step: int) -> dict[tuple, torch.Tensor]:
        """Full gradients by (global name, layer), put together from every rank's shards."""
        return self._whole(name, f"gradients_{step}")

    def weights(self, name: str, step: int) -> dict[tuple, torch.Tensor]:
        """Likewise the weights that `step` began with."""
        return self._whole(name, f"weights_{step}")

    def _whole(self, name: str, what: str) -> dict[tuple, torch.Tensor]:
        full: dict[tuple, torch.Tensor] = {}
        for file in sorted((self.folder / name).glob(f"{what}_*.pt")):
            for key, offset, shape, data in torch.load(file):
                whole = full.setdefault(key, torch.zeros(shape))
                whole[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
        return full


@pytest.fixture(scope="session")
def worlds(corpus, tmp_path_factory) -> Worlds:
    """Worlds of 1, 2 and 4 processes."""
    worlds = Worlds(tmp_path_factory.mktemp("worlds"), corpus)
    case = worlds.case
    models = {name: make(name, worlds.folder / "models" / name, corpus.tokenizer) for name in ("llama", "smollm")}
    all_probes = ("gradients", "perturbation", "logits", "head")
    edges = (1, 5, 9, 13, 17)  # of FIVE
    phases = yaml.safe_load((worlds.folder / "five.yaml").read_text())["phases"]

    def cut(*steps: int) -> str:
        """FIVE with as many phases as there are steps, each so long."""
        return f"phases={json.dumps([phase | {'steps': n} for phase, n in zip(phases, steps, strict=False)])}"

    def branch(optimizer: str) -> tuple[str, str]:
        """What is left of FIVE after its step 8, branched off there."""
        left = json.dumps([phases[2] | {"optimizer": optimizer}, *phases[3:]])
        trunk = worlds.folder / "five-tp1" / "checkpoints" / "iter_0000008"
        return f"phases={left}", f"start={{from: {trunk}}}"

    pieces = (cut(4, 3), cut(4, 4, 4, 1), cut(4, 4, 4, 4, 4))
    worlds.start(
        1,
        [
            case("tp1", PLAIN, OFTEN, probes=all_probes),
            *(case(f"tp1-from-{step}", PLAIN, resume=("tp1", step)) for step in (4, 8, 12)),
            case("micro-1-workers-2", "batch.micro_batch_size=1", "data.num_workers=2"),
            case("tied-tp1", TIED, probes=("gradients", "logits")),
            case("five-tp1", recipe="five", probes=("gradients", "batches"), gradients=edges),
            *(
                case(f"five-micro-{size}", f"batch.micro_batch_size={size}", recipe="five", probes=("batches",))
                for size in (1, 4)
            ),
            # One run in three pieces: each ends inside a phase, and the next makes the run longer.
            *(
                case("five-pieces", phases, f"data.num_workers={workers}", recipe="five", probes=("batches",))
                for phases, workers in ((pieces[0], 0), (pieces[1], 2), (pieces[2], 4))
            ),
            case("every-tp1", recipe="every", probes=("gradients",), gradients=tuple(range(1, 19))),
            *(case(f"branch-{kind}", *branch(kind), recipe="five", probes=("batches",)) for kind in ("keep", "reset")),
            *worlds.attention("tp1", patterns=True),
            *worlds.packed("tp1"),
        ],
    )
    worlds.start(
        2,
        [
            case("dp2", OFTEN),
            *(case(f"dp2-from-{step}", resume=("dp2", step)) for step in (4, 8, 12)),
            case("dp2-plain", PLAIN, DENSE, probes=("gradients",)),
            case("tp2", TP2, probes=all_probes),
            case("tp2-plain", TP2, PLAIN, CHUNKED),
            case("tp2-sp", TP2, SP, probes=all_probes),
            case("pp2", PP2, CHUNKED, probes=("gradients",)),
            case("pp2-plain", PP2, PLAIN),
            case("pp2-vpp2", PP2, VPP2, DENSE, probes=("gradients",)),
            case("tied-pp2", PP2, TIED, CHUNKED, probes=("gradients",)),
            case("dp2-to-tp2-sp", TP2, SP, resume=("dp2", 4)),
            case("dp2-to-pp2", PP2, resume=("dp2", 8)),
            case("dp2-to-tp2", TP2, resume=("dp2", 12)),
            case("five-pp2-recompute", PP2, *RECOMPUTE, recipe="five", probes=("gradients",), gradients=edges),
            case("every-tp2-sp", TP2, SP, CHUNKED, recipe="every"),
            *worlds.attention("tp2", TP2, patterns=True, only=("attention",)),
            *worlds.attention("cp2", CP2, CHUNKED),
            *worlds.packed("cp2", CP2),
            *worlds.attention("pp2-recompute", PP2, *RECOMPUTE, only=("documents", "window")),
        ],
    )
    worlds.start(
        4,
        [
            case("tp2-pp2", TP2, PP2, SP, CHUNKED, probes=("gradients",)),
            case("tied-tp2-pp2", TP2, PP2, SP, TIED, probes=("gradients",)),
            case("dp2-to-tp2-pp2", TP2, PP2, resume=("dp2", 8)),
            case("five-tp2-pp2", TP2, PP2, recipe="five", probes=("gradients",), gradients=edges),
            *(
                case(f"five-tp2-pp2-from-{step}", TP2, PP2, recipe="five", resume=("five-tp2-pp2", step))
                for step in (2, 6, 10, 14, 18)
            ),
            case("branch-tp2-pp2", TP2, PP2, *branch("reset"), recipe="five"),
            *(
                case(f"{name}-tp2-pp2", f"start={{hf: {models[name]}}}", TP2, PP2, SP, recipe="started")
                for name in models
            ),
            case("every-dp2-pp2", PP2, "batch.global_batch_size=8", recipe="every"),
            *worlds.attention("cp4", CP4),
            *worlds.packed("tp2-pp2", TP2, PP2, SP),
            *worlds.attention("tp2-cp2-sp", TP2, CP2, SP),
            *worlds.attention("cp2-pp2", CP2, PP2, only=("documents",)),
        ],
    )
    return worlds


@pytest.fixture(scope="session")
def started(corpus, tmp_path_factory) -> Worlds:
    """Runs that start from each of the models in tests/hf_models.py, which lie in models/, under three layouts.

    In one world: two replicas are what a single process would be.
    """
    worlds = Worlds(tmp_path_factory.mktemp("started"), corpus)
    models = {name: make(name, worlds.folder / "models" / name, corpus.tokenizer) for name in MODELS}
    imported = import_hf(models["qwen2"], worlds.folder / "imported")

    def case(name: str, layout: str, start: str) -> dict:
        length = LONG if MODELS[name][1].get("max_position_embeddings") == LONG else 32
        phases = ["phases=[{objective: mlm, steps: 1, mask_ratio: 0.3}]"] if name == "eurobert" else []
        extra = (start, f"model.seq_length={length}", LAYOUTS[layout.removeprefix("imported-")], *phases)
        return worlds.case(f"{name}-{layout}", *extra, recipe="started", probes=("pipeline",))

    release = f"start={{from: {imported}}}"
    worlds.start(
        2,
        [
            *(case(name, layout, f"start={{hf: {models[name]}}}") for name in MODELS for layout in LAYOUTS),
            *(case("qwen2", f"imported-{layout}", release) for layout in ("tp2", "pp2")),
        ],
    )
    return worlds
