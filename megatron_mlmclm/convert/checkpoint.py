"""A Megatron distributed checkpoint in one process, whatever the layout that wrote it: found, and read in parts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_mlmclm import platform
from megatron_mlmclm.errors import UserError

LATEST = "latest_checkpointed_iteration.txt"
# What an imported checkpoint says of itself, beside its tensors; a run's has Megatron's arguments instead.
MODEL, TOKENIZER, CAUSAL = "mlmclm_model", "mlmclm_tokenizer", "mlmclm_causal"


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint meant by `path`: a run folder, its checkpoints folder (the newest in it), or an iter_N folder.

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    for folder in (path, path / "checkpoints"):
        if (folder / LATEST).is_file():
            step = (folder / LATEST).read_text().strip()
            newest = folder / (f"iter_{int(step):07d}" if step.isdigit() else step)
            return _checked(newest)
    return _checked(path)


def _checked(folder: Path) -> Path:
    if not (folder / ".metadata").is_file():
        raise UserError(f"{folder}: no Megatron checkpoint here (no .metadata); name a run folder or an iter_N folder")
    return folder


def read_common(checkpoint: Path) -> dict[str, Any]:
    """What Megatron saved in `checkpoint` beside tensors: `args`, `iteration` and more.

    Imports megatron, with Transformer Engine hidden.
    """
    platform.hide_transformer_engine()
    with platform.quiet_imports():
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        return load_common_state_dict(checkpoint)  # weights_only


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's full tensors by global name, on the CPU, in their own dtype; the layers of a stack on axis 0.

    Optimizer state is not read.
    """
    parts = CheckpointReader(checkpoint)
    return {name: parts.read(name) for name in parts.shape}


class CheckpointReader:
    """The model's tensors by global name, read in parts. `shape` and `dtype` are known without reading any.

    The layers of a stack are axis 0. Optimizer state is left out.
    """

    def __init__(self, checkpoint: Path) -> None:
        """UserError: it cannot be read."""
        self.checkpoint = checkpoint
        self._reader = FileSystemReader(checkpoint)
        with self._errors():
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._metadata = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
        }
        self.shape = {name: tuple(entry.size) for name, entry in self._metadata.items()}
        self.dtype = {name: entry.properties.dtype for name, entry in self._metadata.items()}

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """The whole tensor, or one layer of a stack without axis 0.

        Raises:
            KeyError: no such tensor.
            UserError: it cannot be read.
        """
        size = list(self.shape[name])
        start = [0] * len(size)
        if layer is not None:
            start[0], size[0] = layer, 1
        target = torch.empty(size, dtype=self.dtype[name])
        chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(size))
        items = create_read_items_for_chunk_list(name, self._metadata[name], [chunk])
        with self._errors():
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target if layer is None else target[0]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with platform.quiet_imports():
                yield
        except (OSError, EOFError, RuntimeError, ValueError, AssertionError) as error:
            raise UserError(f"{self.checkpoint}: cannot be read ({error}); is it complete?") from None


class _Into(LoadPlanner):
    """Puts what is read into one tensor, in place; only the two methods that a read calls do anything."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner
