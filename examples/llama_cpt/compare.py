"""The imported model's CLM loss on held-out text, by Megatron and by transformers, on the very same sequences.

    python compare.py OUTPUT

Megatron's is the last validation of the run in OUTPUT/before, which trains nothing. transformers reads the GGUF itself.
Exit status 1 where the two differ by 0.01 or more.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megatron_mlmclm.loop.datasets import validation_dataset
from megatron_mlmclm.loop.request import read_request


def main(work: Path) -> int:
    logging.disable_progress_bar()
    records = map(json.loads, (work / "before" / "metrics.jsonl").read_text().splitlines())
    ours = [record for record in records if record["kind"] == "valid"][-1]["losses"]
    request = read_request(str(work / "before" / "recipe.yaml"), [], 1)
    samples = validation_dataset(request)
    model = AutoModelForCausalLM.from_pretrained(work, gguf_file="smollm2.gguf", dtype=torch.float32).eval()
    total = count = 0
    for number in range(request.recipe.validation.samples):  # those of clm come first
        sample = {name: torch.from_numpy(samples[number][name]) for name in ("inputs", "labels")}
        with torch.no_grad():
            logits = model(sample["inputs"][None].long()).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, sample["labels"].long(), reduction="sum"))
        count += len(sample["labels"])
    theirs = total / count
    print(f"CLM loss on {count:,} held-out tokens: Megatron {ours['clm']:.4f}, transformers {theirs:.4f}")
    print(f"MLM loss before training: {ours['mlm']:.4f}")
    return int(abs(ours["clm"] - theirs) >= 0.01)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
