"""The weights of a Hugging Face folder, read lazily: a tensor, or some of its rows, when asked for it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_mlmclm.convert.mapping import output_biases, shapes
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.schema import ModelSection

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALL = slice(None)
ROWS_AT_ONCE = 4096  # in comparisons
SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "model.pt")


class Source:
    """Tensors by name. `shape` and `dtype` are known without reading any.

    Safetensors are mapped into memory: what is read is the page cache's, not the process's own memory.
    """

    def __init__(self, folder: Path, files: dict[str, Path], *, pickled: bool) -> None:
        """`files`: which file holds which tensor."""
        self.folder = folder
        self._files = files
        opened = {path: _open(path, pickled) for path in dict.fromkeys(files.values())}
        self._opened = opened
        self.shape: dict[str, tuple[int, ...]] = {}
        self.dtype: dict[str, torch.dtype] = {}
        for name, path in files.items():
            if name not in opened[path].keys():  # noqa: SIM118 - no mapping
                raise UserError(f"{path}: does not hold {name}, which the index of {folder} says it does")
            part = opened[path].get_slice(name)
            self.shape[name] = tuple(part.get_shape())
            self.dtype[name] = part.get_dtype() if pickled else FLOATS.get(part.get_dtype())
            if self.dtype[name] not in FLOATS.values():
                raise UserError(f"{path}: {name} is {part.get_dtype()}; only fp32, fp16 and bf16 weights convert")

    def __iter__(self) -> Iterable[str]:
        return iter(self._files)

    def file_of(self, name: str) -> Path:
        """Where the tensor is."""
        return self._files[name]

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return self.rows(name, 0, self.shape[name][0])

    def rows(self, name: str, start: int, stop: int, columns: slice = ALL) -> Tensor:
        """Rows [start, stop) of the tensor; of a matrix, only its `columns`."""
        part = self._opened[self._files[name]].get_slice(name)
        return part[start:stop] if len(self.shape[name]) == 1 else part[start:stop, columns]


class _Pickled:
    """A pickle file, read by torch's restricted unpickler and mapped, behind the same interface as safetensors."""

    def __init__(self, path: Path) -> None:
        self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not all(isinstance(value, Tensor) for value in self._tensors.values()):
            raise ValueError("no plain dictionary of tensors")

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self._tensors[name])


class _PickledSlice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def __getitem__(self, where: Any) -> Tensor:
        return self._tensor[where]


def open_source(folder: str | Path, *, allow_pickle: bool = False) -> Source:
    """Open the weights of the Hugging Face model in `folder`: safetensors, sharded or not.

    With `allow_pickle` also .bin and .pt files, where there are no safetensors.

    Raises:
        UserError: no weights, a pickle that is not allowed, a shard that is missing, cut or lacks a tensor.
    """
    folder = Path(folder)
    kinds = [(name, False) for name in SAFE] + [(name, True) for name in PICKLES]
    for name, pickled in kinds:
        path = folder / name
        if not path.is_file():
            continue
        if pickled and not allow_pickle:
            raise UserError(
                f"{path}: a pickle, which can hold code; convert it to safetensors, or trust it with `mlmclm import-hf"
                " --allow-pickle`"
            )
        files = _indexed(path) if name.endswith(".json") else _whole(path, pickled)
        return Source(folder, files, pickled=pickled)
    raise UserError(f"{folder}: no weights there ({' or '.join(SAFE)})")


def _indexed(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / Path(file).name for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: no JSON object with a weight_map") from None
    for path in dict.fromkeys(files.values()):
        if not path.is_file():
            raise UserError(f"{path}: this shard is missing, {index.name} names it; copy the folder whole")
    return files


def _whole(path: Path, pickled: bool) -> dict[str, Path]:
    return dict.fromkeys(_open(path, pickled).keys(), path)


def _open(path: Path, pickled: bool) -> Any:
    try:
        return _Pickled(path) if pickled else safe_open(path, framework="pt")
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, AttributeError, LookupError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is it whole?") from None
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":
            raise UserError(f"{path}: holds more than tensors, it is not read") from None
        raise


def check_source(source: Source, model: ModelSection, vocab_size: int) -> None:
    """Compare every tensor's name and shape with what config.json says there should be.

    Raises:
        UserError: names the first tensor that is missing, too many or of another shape; a head that should be the
            embedding and is not; a bias that Megatron has no place for.
    """
    wanted, zeros = shapes(model, vocab_size), output_biases(model)
    where = f"{source.folder}: weights and config.json disagree"
    for name, shape in wanted.items():
        if name not in source.shape:
            raise UserError(f"{where}: {name} {list(shape)} is missing")
        if source.shape[name] != shape:
            raise UserError(f"{where}: {name} is {list(source.shape[name])}, not {list(shape)}")
    for name in source:
        if name in wanted or name.endswith("rotary_emb.inv_freq"):
            continue
        if name == HEAD and model.tie_embeddings:
            _check_tied(source, where)
        elif name not in zeros:
            raise UserError(f"{where}: it has no place for {name} {list(source.shape[name])}")
        elif source.read(name).any():
            raise UserError(f"{source.folder}: {name} is not zero; Megatron has no bias after attention alone")


def _check_tied(source: Source, where: str) -> None:
    """A file may hold the tied head once more."""
    rows = source.shape[EMBEDDING][0]
    same = source.shape[HEAD] == source.shape[EMBEDDING] and all(
        torch.equal(source.rows(HEAD, at, at + ROWS_AT_ONCE), source.rows(EMBEDDING, at, at + ROWS_AT_ONCE))
        for at in range(0, rows, ROWS_AT_ONCE)
    )
    if not same:
        raise UserError(f"{where}: embeddings are tied (tie_word_embeddings), but {HEAD} differs from {EMBEDDING}")
