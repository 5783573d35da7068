"""Who sees whom. `Pattern` imports nothing heavy; the rest imports megatron when first used."""

from typing import TYPE_CHECKING, Any

from megatron_mlmclm.attention.pattern import Direction, Pattern

if TYPE_CHECKING:
    from megatron_mlmclm.attention.sdpa import SdpaCoreAttention
    from megatron_mlmclm.attention.switch import AttentionMismatchError, set_pattern, verify

__all__ = ["AttentionMismatchError", "Direction", "Pattern", "SdpaCoreAttention", "set_pattern", "verify"]


def __getattr__(name: str) -> Any:
    if name == "SdpaCoreAttention":
        from megatron_mlmclm.attention import sdpa as module
    elif name in ("AttentionMismatchError", "set_pattern", "verify"):
        from megatron_mlmclm.attention import switch as module
    else:
        raise AttributeError(name)
    return getattr(module, name)
