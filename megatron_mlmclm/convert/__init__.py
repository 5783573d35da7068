"""Hugging Face <-> Megatron: a table of names per family, and how a checkpoint is read without its world."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mlmclm.convert.export import export_hf
    from megatron_mlmclm.convert.families.config import model_values
    from megatron_mlmclm.convert.fill import fill_weights
    from megatron_mlmclm.convert.importer import import_hf, keep_source
    from megatron_mlmclm.convert.source import Source, check_source, open_source
    from megatron_mlmclm.convert.trunk import Trunk, read_trunk

_HOME = {
    **{"Trunk": "trunk", "read_trunk": "trunk", "export_hf": "export", "fill_weights": "fill"},
    **{"import_hf": "importer", "keep_source": "importer"},
    **{"Source": "source", "check_source": "source", "open_source": "source", "model_values": "families.config"},
}

__all__ = [
    "Source",
    "Trunk",
    "check_source",
    "export_hf",
    "fill_weights",
    "import_hf",
    "keep_source",
    "model_values",
    "open_source",
    "read_trunk",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
