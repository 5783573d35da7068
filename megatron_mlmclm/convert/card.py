"""The model card of an exported encoder: what it is, how it was trained, what it measured."""

import json
from pathlib import Path

from megatron_mlmclm.recipe import Recipe, dump_recipe
from megatron_mlmclm.recipe.phase import PartSection
from megatron_mlmclm.recipe.shown import masked, turn
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

After {step:,} of {steps:,} steps: {tokens:,} tokens in sequences of {seq_length:,}.

## Losses (nats per predicted token)

{losses}

## Recipe

```yaml
{recipe}```
"""


def model_card(recipe: Recipe, checkpoint: Path) -> str:
    """Markdown with the metadata header that the Hugging Face hub reads. Losses come from the run's metrics.jsonl."""
    step = int(checkpoint.name.removeprefix("iter_")) if checkpoint.name.startswith("iter_") else recipe.last_step
    stretch = recipe.stretch_at(step)
    samples = stretch.first_sample + (step - stretch.first_step + 1) * stretch.batch.global_batch_size
    return CARD.format(
        name=recipe.name,
        version=__version__,
        checkpoint=checkpoint.name,
        phases="\n".join(_phases(recipe)),
        step=step,
        steps=recipe.last_step,
        tokens=samples * recipe.model.seq_length,
        seq_length=recipe.model.seq_length,
        losses=_losses(checkpoint.parent.parent / "metrics.jsonl", step),
        recipe=dump_recipe(recipe),
    )


def _phases(recipe: Recipe) -> list[str]:
    start = recipe.start
    lines = [f"From step {start.step:,} of {start.checkpoint}:\n"] if start else []
    for number, stretch in enumerate(recipe.stretches, start=1):
        phase, batch = stretch.phase, stretch.batch.global_batch_size
        what = f"{number}. {phase.objective.upper()} for {stretch.steps:,} steps of {batch:,} sequences"
        lines.append(f"{what}{_masking(phase)}")
        lines += [f"   - {turn(part, phase)}: {part.objective.upper()}{_masking(part)}" for part in phase.parts]
    return lines


def _masking(part: PartSection) -> str:
    return f", {masked(part.mask_ratio)} of tokens masked" if part.mask_ratio else ""


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
