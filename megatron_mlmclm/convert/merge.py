"""`mlmclm merge`: the average of two models' weights, along a line or on a sphere.

BidirLM averages checkpoints after adaptation, to get back what a decoder knew before it became an encoder.
"""

import argparse
import math
import shutil
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor

from megatron_mlmclm.aside import new_folder
from megatron_mlmclm.convert.checkpoint import CAUSAL, MODEL, TOKENIZER, CheckpointReader, find_checkpoint
from megatron_mlmclm.convert.families.config import read_model
from megatron_mlmclm.convert.importer import counted
from megatron_mlmclm.convert.mapping import entries, global_shape, names
from megatron_mlmclm.convert.origin import read_origin
from megatron_mlmclm.convert.shown import progress_bar
from megatron_mlmclm.convert.source import Source, open_source
from megatron_mlmclm.convert.write import Piece, save_shard, write_checkpoint
from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.schema import ModelSection

NEARLY_PARALLEL = 1e-4  # below this sine the arc is its chord
MAY_DIFFER = {"init_method_std", "seq_length", "padded_vocab_size"}
WEIGHTS = (".safetensors", ".bin", ".pt", ".index.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("first", metavar="A", help="Hugging Face folder, or run or import folder of a checkpoint")
    parser.add_argument("second", metavar="B", help="another of the same kind and shape")
    parser.add_argument("--weight", type=float, default=0.5, metavar="W", help="share of B, 0 to 1 (default: 0.5)")
    parser.add_argument("--spherical", action="store_true", help="along the arc between the two, tensor by tensor")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write; must not exist")


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    print(f"merged: {merge(args.first, args.second, args.output, args.weight, spherical=args.spherical)}")


def merge(
    first: str | Path, second: str | Path, output: str | Path, weight: float = 0.5, *, spherical: bool = False
) -> Path:
    """Write (1 - weight) * first + weight * second, tensor by tensor, with the tokenizer and dtype of `first`.

    Two Hugging Face folders give one; two Megatron checkpoints give one without optimizer, as an import does.

    Raises:
        UserError: the two are not models of one shape, or of two kinds.
    """
    first, second, output = Path(first), Path(second), Path(output)
    if not 0.0 <= weight <= 1.0:
        raise UserError(f"--weight {weight}: must be from 0 to 1, the share of {second}")
    kinds = [(folder / "config.json").is_file() for folder in (first, second)]
    if kinds[0] != kinds[1]:
        raise UserError(f"{first} and {second}: one is a Hugging Face folder and one is not; convert one of them")
    mix = partial(mixed, weight=weight, spherical=spherical)
    note = f"The {'spherical' if spherical else 'linear'} average of {first.name} and {weight:g} of {second.name}.\n"
    with new_folder(output) as aside:
        (_merge_folders if kinds[0] else _merge_checkpoints)(first, second, aside, mix)
        (aside / "MERGE.md").write_text(note, encoding="utf-8")
    return output


def mixed(a: Tensor, b: Tensor, *, weight: float, spherical: bool) -> Tensor:
    """The average of two tensors of one shape, computed in fp32, in the dtype of `a`.

    Source of the arc: Shoemake, "Animating rotation with quaternion curves", 1985.
    """
    x, y = a.float(), b.float()
    shares = (1.0 - weight, weight)
    if spherical:
        cosine = torch.dot(x.flatten(), y.flatten()) / (x.norm() * y.norm()).clamp(min=1e-30)
        angle = math.acos(max(-1.0, min(1.0, float(cosine))))
        if math.sin(angle) > NEARLY_PARALLEL:
            shares = tuple(math.sin(share * angle) / math.sin(angle) for share in shares)
    return (shares[0] * x + shares[1] * y).to(a.dtype)


def _merge_folders(first: Path, second: Path, aside: Path, mix: partial) -> None:
    """Files stay cut as those of `first` are."""
    _same_model(first, second, read_model(first), read_model(second))
    a, b = open_source(first), open_source(second)
    for name in {*a.shape} ^ {*b.shape}:
        raise UserError(f"{name} is in one of {first} and {second} alone")
    for name, shape in a.shape.items():
        if b.shape[name] != shape:
            raise UserError(f"{name} is {list(shape)} in {first}, {list(b.shape[name])} in {second}")
    for path in sorted(first.iterdir()):
        if path.is_dir():
            shutil.copytree(path, aside / path.name)
        elif not path.name.endswith(WEIGHTS) or path.name == "model.safetensors.index.json":
            shutil.copyfile(path, aside / path.name)
    by_file: dict[Path, list[str]] = {}
    for name in a:
        by_file.setdefault(a.file_of(name), []).append(name)
    with progress_bar("merging", sum(_bytes(a, name) for name in a)) as advance:
        for path, held in by_file.items():
            tensors = {}
            for name in held:
                tensors[name] = mix(a.read(name), b.read(name))
                advance(tensors[name].nbytes)
            save_shard(tensors, aside / path.name)


def _bytes(source: Source, name: str) -> int:
    return math.prod(source.shape[name]) * source.dtype[name].itemsize


def _merge_checkpoints(first: Path, second: Path, aside: Path, mix: partial) -> None:
    origins = [read_origin(find_checkpoint(folder)) for folder in (first, second)]
    vocabularies = [Tokenizer.load(origin.home / "tokenizer") for origin in origins]
    models = [
        origin.model.model_copy(update={"vocab_size": origin.model.vocab_size or vocabulary.vocab_size})
        for origin, vocabulary in zip(origins, vocabularies, strict=True)
    ]
    _same_model(first, second, *models)
    readers, model = [CheckpointReader(origin.checkpoint) for origin in origins], models[0]
    pieces = []
    for entry in entries(model):
        shape = global_shape(entry, model, model.vocab_size)
        for layer, _ in names(entry, model):
            make = partial(_mix_read, readers, entry.ours, layer, shape[0], mix)
            pieces.append(Piece(entry.ours, shape, readers[0].dtype[entry.ours], make, layer, model.num_layers))
    common = {
        MODEL: yaml.safe_dump(model.model_dump(mode="json")),
        TOKENIZER: vocabularies[0].fingerprint,
        CAUSAL: origins[0].causal,
    }
    for kept in ("tokenizer", "source"):
        if (origins[0].home / kept).is_dir():
            shutil.copytree(origins[0].home / kept, aside / kept)
    with progress_bar("merging", sum(piece.bytes for piece in pieces)) as advance:
        write_checkpoint(aside, [counted(piece, advance) for piece in pieces], common)


def _mix_read(readers: list[CheckpointReader], name: str, layer: int | None, rows: int, mix: partial) -> Tensor:
    """Rows that pad the vocabulary, whose number depends on the layout, are left out."""
    return mix(*(reader.read(name, layer)[:rows] for reader in readers))


def _same_model(first: Path, second: Path, a: ModelSection, b: ModelSection) -> None:
    ours, theirs = (model.model_dump(exclude=MAY_DIFFER) for model in (a, b))
    for key, value in ours.items():
        if theirs[key] != value:
            raise UserError(f"{key} is {value} in {first}, {theirs[key]} in {second}: only models of one shape merge")
