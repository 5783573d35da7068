"""Who sees whom. `Pattern` and `Extent` import nothing heavy; the rest imports megatron when first used."""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_mlmclm.attention.pattern import Direction, Extent, Pattern, Window

if TYPE_CHECKING:
    from megatron_mlmclm.attention.context import cut_sequence
    from megatron_mlmclm.attention.packed import te_refusal
    from megatron_mlmclm.attention.per_sample import PatternParams, extent_of, pattern_params
    from megatron_mlmclm.attention.sdpa import SdpaCoreAttention
    from megatron_mlmclm.attention.switch import AttentionMismatchError, set_pattern, verify, verify_per_sample
    from megatron_mlmclm.attention.te import PatternTEDotProductAttention

_HOME = {
    "AttentionMismatchError": "switch",
    "PatternParams": "per_sample",
    "PatternTEDotProductAttention": "te",
    "SdpaCoreAttention": "sdpa",
    "cut_sequence": "context",
    "extent_of": "per_sample",
    "pattern_params": "per_sample",
    "set_pattern": "switch",
    "te_refusal": "packed",
    "verify": "switch",
    "verify_per_sample": "switch",
}

__all__ = [
    "AttentionMismatchError",
    "Direction",
    "Extent",
    "Pattern",
    "PatternParams",
    "PatternTEDotProductAttention",
    "SdpaCoreAttention",
    "Window",
    "cut_sequence",
    "extent_of",
    "pattern_params",
    "set_pattern",
    "te_refusal",
    "verify",
    "verify_per_sample",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
