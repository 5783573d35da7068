"""Who sees whom. `Pattern` imports nothing heavy; the rest imports megatron when first used."""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_mlmclm.attention.pattern import Direction, Pattern

if TYPE_CHECKING:
    from megatron_mlmclm.attention.per_sample import PatternParams, pattern_params
    from megatron_mlmclm.attention.sdpa import SdpaCoreAttention
    from megatron_mlmclm.attention.switch import AttentionMismatchError, set_pattern, verify, verify_per_sample
    from megatron_mlmclm.attention.te import PatternTEDotProductAttention

_HOME = {
    "AttentionMismatchError": "switch",
    "PatternParams": "per_sample",
    "PatternTEDotProductAttention": "te",
    "SdpaCoreAttention": "sdpa",
    "pattern_params": "per_sample",
    "set_pattern": "switch",
    "verify": "switch",
    "verify_per_sample": "switch",
}

__all__ = [
    "AttentionMismatchError",
    "Direction",
    "Pattern",
    "PatternParams",
    "PatternTEDotProductAttention",
    "SdpaCoreAttention",
    "pattern_params",
    "set_pattern",
    "verify",
    "verify_per_sample",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
