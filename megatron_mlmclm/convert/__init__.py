"""Hugging Face <-> Megatron: a table of names per family, and how a checkpoint is read without its world."""

from megatron_mlmclm.convert.export import export_hf

__all__ = ["export_hf"]
