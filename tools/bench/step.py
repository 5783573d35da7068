#!/usr/bin/env python3
"""A training step of ours against transformers' EuroBERT of the same shape, and against our own other forms.

    python tools/bench/step.py [--shapes wide-vocabulary deep] [--rounds 3] [--steps 12] [--json results.json]

Each job is a process of its own: ours is a real run, `torchrun -m megatron_mlmclm.pretrain`, timed by its metrics; the
peers train EuroBERT on batches that transformers' collator masks, by `Trainer` with its defaults, by a plain loop with
PyTorch's fused AdamW, and by a hand-written loop whose head, too, sees masked positions only. Jobs take turns, and
what is compared are those of one round. Time is a step's median, without the first three; memory the most that the
process had resident, its libraries included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import ROOT, compared, make_parser, resident, tell  # of this folder

SHAPES = {
    "wide-vocabulary": {"hidden": 256, "layers": 4, "vocab": 128_256},
    "deep": {"hidden": 768, "layers": 6, "vocab": 32_768},
}
LENGTH, BATCH, RATIO = 512, 4, 0.30
WARM = 3  # steps that are not counted
OURS = {"ours": (), "ours bf16": ("precision=bf16",), "ours dense head": ("head=dense",)}
COMPARED = {  # case: (ours, the peer)
    "EuroBERT, Trainer": ("ours", "trainer"),
    "EuroBERT, plain loop, fused AdamW": ("ours", "plain"),
    "EuroBERT, masked head by hand": ("ours", "masked"),
    "our loop, Megatron's dense head": ("ours", "ours dense head"),
    "bf16 against our fp32": ("ours bf16", "ours"),
}
RECIPE = """
name: bench
output: {output}
model:
  num_layers: {layers}
  hidden_size: {hidden}
  ffn_hidden_size: {ffn}
  num_attention_heads: {heads}
  seq_length: {length}
data: {{tokenizer: {tokenizer}, train: {data}, num_workers: 1}}
batch: {{micro_batch_size: {batch}, global_batch_size: {batch}}}
phases: [{{objective: mlm, steps: {steps}, mask_ratio: {ratio}}}]
optimizer: {{lr: 1.0e-4}}
"""


def main() -> None:
    """Run the shapes and print them; see the module's docstring."""
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--steps", type=int, default=12, help=f"of each job, {WARM} not counted (12)")
    parser.add_argument("--job", nargs=2, metavar=("JOB", "SHAPE"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        PEERS[options.job[0]](SHAPES[options.job[1]], options.steps, options.work)
        return
    tell((row for shape in options.shapes for row in compare(shape, options.rounds, options.steps)), options.json)


def compare(name: str, rounds: int, steps: int) -> Iterator[dict]:
    """The results of one shape."""
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), SHAPES[name])
        found = [{job: run(job, name, Path(folder), steps) for job in (*OURS, *PEERS)} for _ in range(rounds)]
    for case, (ours, peer) in COMPARED.items():
        rates = [(each[ours]["rate"], each[peer]["rate"]) for each in found]
        yield compared(f"step: {name}, {case}", "tok/s", rates)
    memory = [(each["ours"]["bytes"] / 1e6, each["plain"]["bytes"] / 1e6) for each in found]
    yield compared(f"step: {name}, memory, EuroBERT, plain loop", "MB", memory)


def run(job: str, shape: str, work: Path, steps: int) -> dict[str, float]:
    """Tokens a second and bytes of a process that does one job."""
    if job in OURS:
        output = work / "runs" / str(time.time_ns())
        (work / "recipe.yaml").write_text(recipe(SHAPES[shape], work, steps))
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
        options = ["--recipe", str(work / "recipe.yaml"), f"output={output}", *OURS[job]]
        most = watched(job, [*launched, "megatron_mlmclm.pretrain", *options])
        records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        seconds = [BATCH * LENGTH / each["tokens_per_s"] for each in records if each["kind"] == "train"]
    else:
        own = ["--job", job, shape, "--work", str(work), "--steps", str(steps)]
        most = watched(job, [sys.executable, __file__, *own])
        seconds = json.loads((work / "seconds.json").read_text())
    rate = BATCH * LENGTH / statistics.median(seconds[WARM:])
    print(f"  {shape}, {job}: {rate:,.0f} tok/s", file=sys.stderr, flush=True)
    return {"rate": rate, "bytes": most}


def watched(job: str, command: list[str]) -> int:
    """Run a process; the most bytes that it, or a child of it, had resident. SystemExit where it fails."""
    settings = {"OMP_NUM_THREADS": str(os.cpu_count()), "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    child, most = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL), 0
    while child.poll() is None:
        most = max([most, *(resident("VmHWM", pid) for pid in family(child.pid))])
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{job} failed")
    return most


def family(pid: int) -> list[int]:
    """A process and its children's children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def recipe(shape: dict[str, int], work: Path, steps: int) -> str:
    """Our run of a shape."""
    sizes = {"hidden": shape["hidden"], "layers": shape["layers"], "ffn": 4 * shape["hidden"]}
    places = {"tokenizer": work / "tokenizer", "data": work / "data", "output": work / "runs"}
    rest = {"heads": shape["hidden"] // 64, "length": LENGTH, "batch": BATCH, "steps": steps, "ratio": RATIO}
    return RECIPE.format(**sizes, **places, **rest)


def make_data(work: Path, shape: dict[str, int]) -> None:
    """Random tokens as indexed data, and a tokenizer that has so many words."""
    import numpy as np
    import tokenizers

    from megatron_mlmclm.data.indexed import IndexedWriter, best_dtype

    (work / "tokenizer").mkdir()
    words = {"[UNK]": 0, "[MASK]": 1, "[PAD]": 2, "</s>": 3} | {f"w{n}": n for n in range(4, shape["vocab"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.save(str(work / "tokenizer" / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "mask_token": "[MASK]", "pad_token": "[PAD]", "eos_token": "</s>"}
    (work / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    generator = np.random.default_rng(1)
    with IndexedWriter(work / "data", best_dtype(shape["vocab"])) as writer:
        for _ in range(100):
            writer.add_document(generator.integers(4, shape["vocab"], 2000))


def eurobert(shape: dict[str, int]) -> Any:
    """transformers' model of that shape."""
    import torch
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    torch.manual_seed(1)
    config = EuroBertConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=4 * shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["hidden"] // 64,
        num_key_value_heads=shape["hidden"] // 64,
        pad_token_id=2,
        bos_token_id=3,
        eos_token_id=3,
    )
    return EuroBertForMaskedLM(config)


def examples(shape: dict[str, int], count: int) -> list[dict[str, list[int]]]:
    """Sequences of random tokens."""
    import torch

    tokens = torch.randint(4, shape["vocab"], (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row.tolist()} for row in tokens]


def collator(work: Path) -> Callable[[list], dict]:
    """transformers' own masking, all chosen tokens masked as ours are."""
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=RATIO, mask_replace_prob=1.0, random_replace_prob=0.0
    )


def by_trainer(shape: dict[str, int], steps: int, work: Path) -> None:
    """EuroBERT under `Trainer` with the optimizer that it takes by default."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            ticks.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            ticks.append(time.perf_counter())

    ticks: list[float] = []
    arguments = TrainingArguments(
        output_dir=str(work / "trainer"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=1e-4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data, collate = examples(shape, steps * BATCH), collator(work)
    Trainer(eurobert(shape), arguments, data_collator=collate, train_dataset=data, callbacks=[Clock()]).train()
    seconds = [after - before for before, after in zip(ticks, ticks[1:], strict=False)]
    (work / "seconds.json").write_text(json.dumps(seconds[:-1]))  # the last has the end of the training in it


def by_loop(shape: dict[str, int], steps: int, work: Path, masked_head: bool = False) -> None:
    """EuroBERT in a plain loop with the optimizer's settings that ours has."""
    import torch
    from torch.nn.functional import cross_entropy

    model, collate = eurobert(shape), collator(work)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1, fused=True)
    data, seconds = examples(shape, steps * BATCH), []
    for step in range(steps):
        began = time.perf_counter()
        batch = collate(data[step * BATCH : (step + 1) * BATCH])
        if masked_head:
            hidden = model.model(batch["input_ids"]).last_hidden_state
            chosen = batch["labels"] != -100
            loss = cross_entropy(model.lm_head(hidden[chosen]), batch["labels"][chosen])
        else:
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - began)
    (work / "seconds.json").write_text(json.dumps(seconds))


def by_masked_loop(shape: dict[str, int], steps: int, work: Path) -> None:
    """As `by_loop`, with the head at masked positions only."""
    by_loop(shape, steps, work, masked_head=True)


PEERS: dict[str, Callable[[dict[str, int], int, Path], None]] = {
    "trainer": by_trainer,
    "plain": by_loop,
    "masked": by_masked_loop,
}

if __name__ == "__main__":
    main()
