"""What Megatron runs on. `prepare()` is called once a process, before anything imports megatron."""

from megatron_mlmclm.platform.cpu import hide_transformer_engine, prepare, transformer_implementation

__all__ = ["hide_transformer_engine", "prepare", "transformer_implementation"]
