"""A Megatron distributed checkpoint written by one process, each tensor made only when its turn to be written comes."""

import io
import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_mlmclm import platform
from megatron_mlmclm.errors import UserError

COMMON = "common_state/shard_0_1"  # where Megatron 0.19 keeps what is no tensor
# Layers ask for a state beside their weights, under Transformer Engine norms do, too; it is None but for fp8.
EXTRA_STATE = "_extra_state"
WITH_EXTRA_STATE = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm"),
)
CHECKPOINT_VERSION = 3.0  # below 3 Megatron would turn QKV weights around when it loads them
RELEASE = "release"  # Megatron's name for weights without iteration and optimizer


@dataclass(frozen=True)
class Piece:
    """One tensor to write; of a stack of layers, one layer.

    Attributes:
        name: Megatron's global name.
        shape: of the tensor that `make` gives.
        layer: its place on axis 0, of `layers`; None outside of the layers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    layer: int | None = None
    layers: int = 0

    @property
    def bytes(self) -> int:
        """Of the tensor that `make` gives."""
        return math.prod(self.shape) * self.dtype.itemsize

    def write_item(self, number: int) -> WriteItem:
        """What torch's checkpoint writer wants to know in advance."""
        lead = () if self.layer is None else (1,)
        offset = torch.Size(((self.layer,) if lead else ()) + (0,) * len(self.shape))
        chunk = ChunkStorageMetadata(offset, torch.Size((*lead, *self.shape)))
        whole = torch.Size(((self.layers,) if lead else ()) + self.shape)
        return WriteItem(
            index=MetadataIndex(self.name, offset, number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), whole),
        )


class _AtWriteTime(DefaultSavePlanner):
    """Makes each tensor when it is written, and one at a time: memory holds the largest of each name, not the model."""

    def __init__(self, pieces: list[Piece], common: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._common = pieces, common

    def create_local_plan(self) -> SavePlan:
        objects = [COMMON, *_extra_states(max(piece.layers for piece in self._pieces))]
        items = [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in objects]
        numbers: dict[str, int] = {}
        self._makers = {}
        for piece in self._pieces:
            number = numbers[piece.name] = numbers.get(piece.name, -1) + 1
            items.append(piece.write_item(number))
            self._makers[items[-1].index] = piece
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([self._common if write_item.index.fqn == COMMON else None], data)
            return data
        piece = self._makers[write_item.index]
        tensor = piece.make()
        if tuple(tensor.shape) != piece.shape or tensor.dtype != piece.dtype:
            raise ValueError(f"{piece.name} came as {tensor.dtype} {list(tensor.shape)}, not as planned")
        return tensor if piece.layer is None else tensor[None]


def _extra_states(layers: int) -> list[str]:
    stacks = [f"decoder.layers.{linear}.{EXTRA_STATE}" for linear in WITH_EXTRA_STATE]
    found = [f"{stack}/shard_{layer}_{layers}" for stack in stacks for layer in range(layers)]
    return [*found, f"decoder.final_layernorm.{EXTRA_STATE}/shard_0_1"]


def write_checkpoint(folder: Path, pieces: list[Piece], common: dict[str, Any]) -> None:
    """Write `pieces` as checkpoints/release below `folder`, which Megatron's --load takes for any layout.

    `common`: what to keep beside the tensors.

    Raises:
        UserError: the disk is full, or the like.
    """
    checkpoint = folder / "checkpoints" / RELEASE
    checkpoint.mkdir(parents=True)
    common = {**common, "checkpoint_version": CHECKPOINT_VERSION}
    writer = FileSystemWriter(checkpoint, single_file_per_rank=True, thread_count=1)
    try:
        with platform.quiet_imports():
            save({}, storage_writer=writer, planner=_AtWriteTime(pieces, common), no_dist=True)
    except CheckpointException as failure:
        error = next(iter(failure.failures.values()))[0]
        if isinstance(error, UserError):
            raise error from None
        raise UserError(f"{folder}: cannot write: {error}; is the disk full?") from None
    except (OSError, RuntimeError, pickle.PicklingError) as error:
        raise UserError(f"{folder}: cannot write: {error}; is the disk full?") from None
    (checkpoint / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text(RELEASE)


def save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one safetensors file, beside a config.json.

    Raises:
        UserError: the disk is full, or the like.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{path.parent}: cannot write: {error}; is the disk full?") from None
    shutil.copymode(path.parent / "config.json", path)  # safetensors writes for the owner alone
