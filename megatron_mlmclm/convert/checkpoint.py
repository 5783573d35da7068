"""Reading a Megatron distributed checkpoint in one process, whatever the layout that wrote it."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_mlmclm import platform
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe, parse_recipe

LATEST = "latest_checkpointed_iteration.txt"


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


def read_recipe(checkpoint: Path) -> Recipe:
    """The recipe that made `checkpoint`, from the arguments Megatron saved with it. Imports megatron."""
    text = getattr(read_common(checkpoint).get("args"), "mlmclm_recipe", None)
    if text is None:
        raise UserError(f"{checkpoint}: holds no recipe; was it written by megatron_mlmclm?")
    return parse_recipe(yaml.safe_load(text), f"{checkpoint} (saved recipe)")


def read_common(checkpoint: Path) -> dict[str, Any]:
    """What Megatron saved in `checkpoint` beside tensors: `args`, `iteration` and more.

    Imports megatron, with Transformer Engine hidden.
    """
    platform.hide_transformer_engine()
    with platform.quiet_imports():
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        return load_common_state_dict(checkpoint)  # weights_only


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's full tensors by global name, on the CPU, in their own dtype; the layers of a stack on axis 0.

    Optimizer state is not read.
    """
    reader = FileSystemReader(checkpoint)
    try:
        metadata = reader.read_metadata().state_dict_metadata
        weights = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
        }
        with platform.quiet_imports():
            load(weights, storage_reader=reader, no_dist=True)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        raise UserError(f"{checkpoint}: cannot be read ({error}); is it complete?") from None
    return weights
