"""What Megatron runs on. `prepare()` is called once a process, before anything imports megatron."""

from megatron_mlmclm.platform.cpu import prepare, transformer_implementation

__all__ = ["prepare", "transformer_implementation"]
