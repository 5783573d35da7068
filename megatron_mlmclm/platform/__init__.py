"""What Megatron runs on. `prepare()` is called once a process, before anything imports megatron."""

from megatron_mlmclm.platform.cpu import hide_transformer_engine, prepare, quiet_imports, transformer_implementation
from megatron_mlmclm.platform.doctor import has_liger, has_nvidia_apex

__all__ = [
    "has_liger",
    "has_nvidia_apex",
    "hide_transformer_engine",
    "prepare",
    "quiet_imports",
    "transformer_implementation",
]
