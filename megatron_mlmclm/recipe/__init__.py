"""What a run is: a typed recipe, its checks, and its form as Megatron arguments."""

from megatron_mlmclm.recipe.arguments import megatron_flags, owned_flags
from megatron_mlmclm.recipe.checks import check_platform, check_recipe
from megatron_mlmclm.recipe.load import dump_recipe, load_recipe, parse_recipe, preset_names
from megatron_mlmclm.recipe.schema import Recipe

__all__ = [
    "Recipe",
    "check_platform",
    "check_recipe",
    "dump_recipe",
    "load_recipe",
    "megatron_flags",
    "owned_flags",
    "parse_recipe",
    "preset_names",
]
