"""What a run is: a typed recipe, its checks, its learning rates and data, and its form as Megatron arguments."""

from megatron_mlmclm.recipe.arguments import megatron_flags, owned_flags
from megatron_mlmclm.recipe.budget import settled
from megatron_mlmclm.recipe.checks import check_platform, check_recipe
from megatron_mlmclm.recipe.course import courses, place_after
from megatron_mlmclm.recipe.load import dump_recipe, load_recipe, parse_recipe, preset_names
from megatron_mlmclm.recipe.phase import Segment, Stretch
from megatron_mlmclm.recipe.rates import learning_rate
from megatron_mlmclm.recipe.schema import Recipe

__all__ = [
    "Recipe",
    "Segment",
    "Stretch",
    "check_platform",
    "check_recipe",
    "courses",
    "dump_recipe",
    "learning_rate",
    "load_recipe",
    "megatron_flags",
    "owned_flags",
    "parse_recipe",
    "place_after",
    "settled",
    "preset_names",
]
