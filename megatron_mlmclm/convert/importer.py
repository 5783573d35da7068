"""`mlmclm import-hf`: a Hugging Face folder -> a Megatron checkpoint that loads under any layout."""

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import torch
import yaml

from megatron_mlmclm.aside import new_folder
from megatron_mlmclm.convert.checkpoint import CAUSAL, MODEL, TOKENIZER
from megatron_mlmclm.convert.families.config import is_causal, read_model
from megatron_mlmclm.convert.gguf import unpack
from megatron_mlmclm.convert.mapping import blocks, entries, fused, global_shape, names
from megatron_mlmclm.convert.shown import progress_bar
from megatron_mlmclm.convert.source import Source, check_source, open_source
from megatron_mlmclm.convert.write import Piece, write_checkpoint
from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.data.tokenizer_make import add_mask_token
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.schema import ModelSection

# Of the source folder, what an export made from it must carry along or can be made of.
KEPT = ("config.json", "README.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("folder", metavar="DIR", help="Hugging Face folder (config.json, safetensors), or a .gguf file")
    parser.add_argument("--output", required=True, metavar="CKPT", help="folder to write; must not exist")
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer folder (default: the one in DIR)")
    parser.add_argument("--mask-piece", metavar="P", help="piece to be the mask token (default: a known reserved one)")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .bin and .pt, too: only of a source you trust"
    )


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    output = import_hf(
        args.folder, args.output, args.tokenizer, mask_piece=args.mask_piece, allow_pickle=args.allow_pickle
    )
    print(f"checkpoint: {output}")


def import_hf(
    folder: str | Path,
    output: str | Path,
    tokenizer: str | Path | None = None,
    *,
    mask_piece: str | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Write `output`: checkpoints/release, tokenizer/ with a mask token if it has a piece to spare, and source/.

    Tensors are read, fused and written one by one. Weights keep their dtype. Written aside and renamed when complete.

    Raises:
        UserError: what is in `folder` is not a model of a known family, whole and as its config says.
    """
    output = Path(output)
    with new_folder(output) as aside, _unpacked(Path(folder), aside) as folder:
        model = read_model(folder)
        source = open_source(folder, allow_pickle=allow_pickle)
        check_source(source, model, model.vocab_size)
        vocabulary = Tokenizer.load(tokenizer or folder)
        if vocabulary.vocab_size > model.vocab_size:
            raise UserError(
                f"{vocabulary.folder}: the tokenizer has {vocabulary.vocab_size} ids, the model in {folder} knows"
                f" {model.vocab_size}: name the model's own --tokenizer"
            )
        _copy_tokenizer(vocabulary.folder, aside / "tokenizer", mask_piece)
        keep_source(folder, aside / "source")
        common = {
            MODEL: yaml.safe_dump(model.model_dump(mode="json")),
            TOKENIZER: vocabulary.fingerprint,
            CAUSAL: is_causal(folder),
        }
        pieces = pieces_of(source, model)
        with progress_bar("importing", sum(piece.bytes for piece in pieces)) as advance:
            write_checkpoint(aside, [counted(piece, advance) for piece in pieces], common)
    return output


@contextlib.contextmanager
def _unpacked(path: Path, beside: Path) -> Iterator[Path]:
    """The folder of the model; of a GGUF file, one made of it while it is needed."""
    if path.suffix != ".gguf":
        yield path
        return
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        yield unpack(path, Path(folder))


def pieces_of(source: Source, model: ModelSection) -> list[Piece]:
    """Megatron's tensors of `model`, each to be made from `source` when it is written."""
    found = []
    for entry in entries(model):
        shape = global_shape(entry, model, model.vocab_size)
        for layer, theirs in names(entry, model):
            parts = blocks(entry, theirs, model, model.vocab_size)
            make = partial(fused, parts, 0, shape[0], slice(None), source.rows)
            dtype = reduce(torch.promote_types, (source.dtype[name] for name in theirs))
            found.append(Piece(entry.ours, shape, dtype, make, layer, model.num_layers))
    return found


def keep_source(folder: Path, kept: Path) -> None:
    """Copy config, model card and licence of the model in `folder` to the new folder `kept`."""
    kept.mkdir()
    for path in sorted(path for pattern in KEPT for path in folder.glob(pattern)):
        shutil.copyfile(path, kept / path.name)


def _copy_tokenizer(folder: Path, copy: Path, mask_piece: str | None) -> None:
    if add_mask_token(folder, copy, mask_piece, optional=True) is None:
        print(f"{folder}: no piece known to be reserved, so no mask token; name one with --mask-piece for MLM")


def counted(piece: Piece, advance: Callable[[int], None]) -> Piece:
    """The same, telling `advance` the bytes of each tensor that is made."""

    def make() -> torch.Tensor:
        tensor = piece.make()
        advance(tensor.nbytes)
        return tensor

    return replace(piece, make=make)
