"""The families that convert, each a short file. Needs neither torch nor megatron."""

from megatron_mlmclm.convert.families import eurobert, llama, mistral, qwen2, qwen3
from megatron_mlmclm.convert.families.base import Entry, Family, table

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (llama, mistral, qwen2, qwen3, eurobert)}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES.values()}

__all__ = ["BY_ARCHITECTURE", "FAMILIES", "Entry", "Family", "table"]
