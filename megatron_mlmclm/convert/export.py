"""`mlmclm export-hf`: a Megatron checkpoint -> a Hugging Face folder that needs no code of ours."""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_mlmclm.aside import new_folder
from megatron_mlmclm.convert.card import carry_licence, model_card
from megatron_mlmclm.convert.checkpoint import CheckpointReader, find_checkpoint
from megatron_mlmclm.convert.families import FAMILIES, Entry
from megatron_mlmclm.convert.families.base import HEAD
from megatron_mlmclm.convert.mapping import blocks, entries, global_shape, names, output_biases, parted
from megatron_mlmclm.convert.origin import Origin, read_origin
from megatron_mlmclm.convert.shown import bytes_in, progress_bar
from megatron_mlmclm.convert.source import FLOATS
from megatron_mlmclm.convert.target import SENTENCES, TARGETS, write_target
from megatron_mlmclm.convert.write import save_shard
from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.schema import ModelSection

LARGEST_SHARD = "5GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("checkpoint", help="run folder (its newest checkpoint), checkpoints folder, or iter_N folder")
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    parser.add_argument("--tokenizer", help="tokenizer folder (default: the one kept in the run folder)")
    parser.add_argument(
        "--as", dest="target", choices=TARGETS, default="eurobert", help="what to be (default: eurobert)"
    )
    parser.add_argument("--max-shard-size", default=LARGEST_SHARD, metavar="SIZE", help="of a file (default: 5GB)")


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    output = export_hf(args.checkpoint, args.output, args.tokenizer, args.target, args.max_shard_size)
    print(f"{'encoder' if args.target in ('eurobert', 'sentence-transformers') else 'model'}: {output}")


def export_hf(
    checkpoint: str | Path,
    output: str | Path,
    tokenizer: str | Path | None = None,
    target: str = "eurobert",
    max_shard_size: str = LARGEST_SHARD,
) -> Path:
    """Write `output`: safetensors, config, tokenizer, model card and the source's licence, in the form of `target`.

    The checkpoint may come from any tensor and pipeline parallel layout. It is read tensor by tensor, so that one file
    of the output is held at a time. Written aside and renamed when complete.

    Raises:
        UserError: no checkpoint or tokenizer, an output that exists, a checkpoint that does not fit its recipe, a model
            that `target` has no form for.
    """
    folder, output, limit = find_checkpoint(checkpoint), Path(output), bytes_in(max_shard_size)
    with new_folder(output) as aside:
        origin = read_origin(folder)
        source = _tokenizer_folder(origin, tokenizer)
        vocabulary = Tokenizer.load(source)
        vocab_size = origin.model.vocab_size or vocabulary.vocab_size
        reader = CheckpointReader(folder)
        _check(reader, origin.model, vocab_size)
        write_target(aside, target, origin, vocabulary, reader.dtype["decoder.final_layernorm.weight"])
        family = FAMILIES.get(target, FAMILIES["eurobert"])
        zeros = output_biases(origin.model) if family.qkv_bias == "config" else {}
        units = [
            unit for unit in _units(reader, origin.model, vocab_size) if target != SENTENCES or unit.entry.ours != HEAD
        ]
        _write_weights(aside, _shards(units, limit), partial(_tensors, reader, origin.model, vocab_size), zeros)
        for file in sorted(source.iterdir()):
            shutil.copy(file, aside / file.name)
        carry_licence(origin.home / "source", aside)
        (aside / "README.md").write_text(model_card(origin, target, output.name), encoding="utf-8")
    return output


def _tokenizer_folder(origin: Origin, named: str | Path | None) -> Path:
    if named:
        return Path(named)
    kept = origin.home / "tokenizer"
    if origin.recipe is None or kept.is_dir():
        return kept
    return Path(origin.recipe.data.tokenizer)


@dataclass(frozen=True)
class Unit:
    """One of Megatron's tensors (of a stack, one layer), to be read once, and the Hugging Face ones made of it."""

    entry: Entry
    layer: int | None
    theirs: tuple[str, ...]
    bytes: int


def _write_weights(
    folder: Path, shards: list[list[Unit]], read: Callable[[Unit], dict[str, Tensor]], zeros: dict[str, tuple[int, ...]]
) -> None:
    """Write one safetensors file for each of `shards` and, of several, their index.

    `zeros`: shapes of tensors that the family has and Megatron has not; they go into the last file.
    """
    weight_map: dict[str, str] = {}
    total = 0
    with progress_bar("exporting", sum(unit.bytes for shard in shards for unit in shard)) as advance:
        for number, shard in enumerate(shards, start=1):
            count = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            name = f"model{count}.safetensors"
            tensors = {}
            for unit in shard:
                tensors |= read(unit)
                advance(unit.bytes)
            if number == len(shards):
                dtype = next(iter(tensors.values())).dtype
                tensors |= {bias: torch.zeros(shape, dtype=dtype) for bias, shape in zeros.items()}
            save_shard(tensors, folder / name)
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(tensor.nbytes for tensor in tensors.values())
            del tensors  # before the next file is read
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _units(reader: CheckpointReader, model: ModelSection, vocab_size: int) -> list[Unit]:
    """In the order of a forward pass."""
    found = []
    for place, entry in enumerate(entries(model)):
        for layer, theirs in names(entry, model):
            elements = torch.Size(global_shape(entry, model, vocab_size)).numel()
            order = (0 if place == 0 else 2) if layer is None else 1
            found.append(
                (order, layer or 0, place, Unit(entry, layer, theirs, elements * reader.dtype[entry.ours].itemsize))
            )
    return [unit for *_, unit in sorted(found, key=lambda each: each[:3])]


def _shards(units: list[Unit], limit: int) -> list[list[Unit]]:
    shards: list[list[Unit]] = [[]]
    for unit in units:
        if shards[-1] and sum(each.bytes for each in shards[-1]) + unit.bytes > limit:
            shards.append([])
        shards[-1].append(unit)
    return shards


def _tensors(reader: CheckpointReader, model: ModelSection, vocab_size: int, unit: Unit) -> dict[str, Tensor]:
    """The Hugging Face tensors of `unit`, in the shapes that the family's table says."""
    parts = blocks(unit.entry, unit.theirs, model, vocab_size)
    whole = reader.read(unit.entry.ours, unit.layer)
    if len(parts) > 1:
        return {name: parted(parts, name, whole) for name in unit.theirs}
    rows = parts[0].stop
    return {unit.theirs[0]: whole if len(whole) == rows else whole[:rows].clone()}  # Megatron's padding goes


def _check(reader: CheckpointReader, model: ModelSection, vocab_size: int) -> None:
    """Every tensor of the recipe's model is in the checkpoint, in its shape; the vocabulary may be padded."""
    for entry in entries(model):
        shape = global_shape(entry, model, vocab_size)
        found = reader.shape.get(entry.ours, ())
        rows = found[1:] if entry.layered else found
        padded = "vocabulary" in entry.rows and rows[1:] == shape[1:] and rows[0] >= shape[0]
        if not (rows == shape or padded) or (entry.layered and found[0] != model.num_layers):
            wanted = (model.num_layers, *shape) if entry.layered else shape
            has = list(found) if found else "not in it"
            raise UserError(f"{reader.checkpoint}: does not fit its recipe: {entry.ours} is {has}, not {list(wanted)}")
        if reader.dtype[entry.ours] not in FLOATS.values():
            raise UserError(f"{reader.checkpoint}: {entry.ours} is {reader.dtype[entry.ours]}, which is not exported")
