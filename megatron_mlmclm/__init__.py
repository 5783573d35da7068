"""Masked-LM and biphasic (CLM, then MLM) encoder pretraining on NVIDIA Megatron-Core.

Importing the package imports neither torch nor megatron: each room is imported by the verb that needs it.
"""

from megatron_mlmclm.version import __version__

__all__ = ["__version__"]
