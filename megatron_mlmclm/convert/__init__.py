"""Hugging Face <-> Megatron: a table of names per family, and how a checkpoint is read without its world."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mlmclm.convert.export import export_hf
    from megatron_mlmclm.convert.trunk import Trunk, read_trunk

_HOME = {"Trunk": "trunk", "export_hf": "export", "read_trunk": "trunk"}

__all__ = ["Trunk", "export_hf", "read_trunk"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
