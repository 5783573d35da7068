"""The model card of an exported encoder: what it is, how it was trained, what it measured."""

import json
from pathlib import Path

from megatron_mlmclm.recipe import Recipe, dump_recipe
from megatron_mlmclm.version import __version__

CARD = """---
library_name: transformers
pipeline_tag: fill-mask
tags: [masked-lm, encoder, eurobert, megatron]
---

# {name}

A bidirectional encoder in EuroBERT's architecture, pretrained with megatron_mlmclm {version} (checkpoint {checkpoint}).
It loads with `AutoModelForMaskedLM.from_pretrained(...)`, without remote code.

## Training

{phases}

After {step:,} of {steps:,} steps: {tokens:,} tokens in sequences of {seq_length:,}, {batch:,} sequences a step.

## Losses (nats per predicted token)

{losses}

## Recipe

```yaml
{recipe}```
"""


def model_card(recipe: Recipe, checkpoint: Path) -> str:
    """Markdown with the metadata header that the Hugging Face hub reads. Losses come from the run's metrics.jsonl."""
    step = int(checkpoint.name.removeprefix("iter_")) if checkpoint.name.startswith("iter_") else recipe.steps
    batch = recipe.batch.global_batch_size
    return CARD.format(
        name=recipe.name,
        version=__version__,
        checkpoint=checkpoint.name,
        phases="\n".join(_phases(recipe)),
        step=step,
        steps=recipe.steps,
        tokens=step * batch * recipe.model.seq_length,
        seq_length=recipe.model.seq_length,
        batch=batch,
        losses=_losses(checkpoint.parent.parent / "metrics.jsonl", step),
        recipe=dump_recipe(recipe),
    )


def _phases(recipe: Recipe) -> list[str]:
    lines = []
    for number, phase in enumerate(recipe.phases, start=1):
        ratio = f", {phase.mask_ratio:.0%} of tokens masked" if phase.mask_ratio else ""
        lines.append(f"{number}. {phase.objective.upper()} for {phase.steps:,} steps{ratio}")
    return lines


def _losses(metrics: Path, step: int) -> str:
    """The last training loss of each phase, then every objective's last validation loss, up to `step`."""
    if not metrics.is_file():
        return "Not recorded beside this checkpoint."
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    training: dict[str, float] = {}
    validation: dict[str, float] = {}
    for line in (line for line in lines if line["step"] <= step):
        if line["kind"] == "train":
            training[f"training, phase {line['phase'] + 1} ({line['objective']}), last step"] = line["loss"]
        else:
            validation.update({f"validation, {name}, last": loss for name, loss in line["losses"].items()})
    rows = "\n".join(f"| {what} | {loss:.4f} |" for what, loss in {**training, **validation}.items())
    return f"| | loss |\n|---|---|\n{rows}"
