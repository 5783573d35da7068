"""The model card of an exported model: what it is, how it was trained, what it measured."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from megatron_mlmclm.convert.families import FAMILIES
from megatron_mlmclm.convert.origin import Origin
from megatron_mlmclm.recipe import Recipe, dump_recipe
from megatron_mlmclm.recipe.phase import PartSection
from megatron_mlmclm.recipe.shown import masked, turn
from megatron_mlmclm.version import __version__

CARD = """---
{header}---

# {name}

{what}
{loading}

## Training

{training}
{source}"""
RUN = """{phases}

After {step:,} of {steps:,} steps: {tokens:,} tokens in sequences of {seq_length:,}.

## Losses (nats per predicted token)

{losses}

## Recipe

```yaml
{recipe}```
"""
SOURCE = """
## Source

The weights began as another model's, whose card is SOURCE_README.md and whose licence is carried along.
"""
# target -> (what the hub should call it, which of transformers' classes loads it)
KINDS = {
    "eurobert": ("fill-mask", "`AutoModelForMaskedLM.from_pretrained(...)`"),
    "sentence-transformers": ("sentence-similarity", "`SentenceTransformer(...)`"),
}
DECODER = ("text-generation", "`AutoModelForCausalLM.from_pretrained(...)`")


def model_card(origin: Origin, target: str, name: str) -> str:
    """Markdown with the metadata header that the Hugging Face hub reads. Losses come from the run's metrics.jsonl."""
    tag, loader = KINDS.get(target, DECODER)
    encoder = target in KINDS
    family = FAMILIES.get(target, FAMILIES["eurobert"])
    header = {
        "library_name": target if target == "sentence-transformers" else "transformers",
        "pipeline_tag": tag,
        "tags": [*(["masked-lm", "encoder"] if encoder else []), family.name, "megatron"],
        **_licence(origin.home / "source" / "README.md"),
    }
    direction = "causal" if origin.causal else "bidirectional"
    return CARD.format(
        header=yaml.safe_dump(header, sort_keys=False),
        name=origin.recipe.name if origin.recipe else name,
        what=f"{'An encoder' if encoder else 'A model'} in the form of {family.architecture}, its attention last"
        f" {direction}; made with megatron_mlmclm {__version__} (checkpoint {origin.checkpoint.name}).",
        loading=f"It loads with {loader}, without remote code.",
        training=_run(origin) if origin.recipe else "Converted; not trained here.\n",
        source=SOURCE if (origin.home / "source" / "README.md").is_file() else "",
    )


def carry_licence(source: Path, output: Path) -> None:
    """Copy what the source of the weights says of itself and of its terms, where it is known."""
    for path in source.glob("*"):
        if path.name != "config.json":
            shutil.copyfile(path, output / ("SOURCE_README.md" if path.name == "README.md" else path.name))


def _licence(card: Path) -> dict[str, Any]:
    """What the header of the source's card says of its licence."""
    if not card.is_file():
        return {}
    _, _, rest = card.read_text(encoding="utf-8", errors="replace").partition("---\n")
    try:
        header = yaml.safe_load(rest.partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    keys = ("license", "license_name", "license_link")
    return {key: header[key] for key in keys if isinstance(header, dict) and key in header}


def _run(origin: Origin) -> str:
    recipe, step = origin.recipe, origin.step
    stretch = recipe.stretch_at(step)
    samples = stretch.first_sample + (step - stretch.first_step + 1) * stretch.batch.global_batch_size
    return RUN.format(
        phases="\n".join(_phases(recipe)),
        step=step,
        steps=recipe.last_step,
        tokens=samples * recipe.model.seq_length,
        seq_length=recipe.model.seq_length,
        losses=_losses(origin.home / "metrics.jsonl", step),
        recipe=dump_recipe(recipe),
    )


def _phases(recipe: Recipe) -> list[str]:
    start = recipe.start
    lines = []
    if start is not None:
        lines = [f"From {start.hf}:\n" if start.hf else f"From step {start.step:,} of {start.checkpoint}:\n"]
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
