"""What the user asked for: a recipe with overrides, checked against tokenizer and data, and extra Megatron flags."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_mlmclm.convert import Trunk
from megatron_mlmclm.data import Stream, Tokenizer, open_stream, read_sidecar, word_marks
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.start import check_origin, find_start, origin
from megatron_mlmclm.loop.views import measured_views, names_words, timeline_of
from megatron_mlmclm.objectives import Vocabulary
from megatron_mlmclm.phases import Timeline, View
from megatron_mlmclm.recipe import Recipe, check_recipe, courses, load_recipe, owned_flags, settled

ALLOW = "--allow"  # NAME: what may differ from the checkpoint that the run starts from
CUDA_GRAPHS = ("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph")


@dataclass(frozen=True)
class Request:
    """A checked run. `views` are the phases' followed by the validation's; a sample carries its view's number.

    `streams` are the indexed datasets by path, `origin` what a branch of this run must share with it, `trunk` the
    checkpoint to begin at where the run branches off one and has none of its own yet.
    """

    recipe: Recipe
    flags: tuple[str, ...]  # the user's own Megatron flags
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    timeline: Timeline
    views: tuple[View, ...]
    streams: dict[str, Stream]
    origin: dict[str, Any]
    trunk: Trunk | None


def read_request(path: str, extra: Sequence[str], world_size: int | None) -> Request:
    """Load the recipe at `path` with `extra` (`key=value` overrides first, then Megatron flags) and check it all.

    Raises:
        UserError: one line; nothing was written.
    """
    overrides, flags = _split(extra)
    recipe = load_recipe(path, overrides)
    tokenizer = Tokenizer.load(recipe.data.tokenizer)
    recipe = settled(recipe, tokenizer.vocab_size)
    check_flags(flags, recipe)
    recipe, trunk = find_start(recipe)
    check_recipe(recipe, world_size, tokenizer.vocab_size)
    vocabulary = _vocabulary(tokenizer, recipe)
    timeline = timeline_of(recipe, vocabulary)
    streams = _open_streams(recipe, tokenizer)
    found = origin(recipe, tokenizer, streams)
    if trunk:
        check_origin(trunk, recipe, found)
    return Request(
        recipe=recipe,
        flags=tuple(flags),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        timeline=timeline,
        views=(*timeline.views, *measured_views(recipe, vocabulary)),
        streams=streams,
        origin=found,
        trunk=trunk,
    )


def _split(extra: Sequence[str]) -> tuple[list[str], list[str]]:
    """Everything before the first `--flag` is an override; `--allow NAME`, anywhere, is one of `start.allow`."""
    rest, allowed = list(extra), []
    while ALLOW in rest:
        at = rest.index(ALLOW)
        if at + 1 == len(rest):
            raise UserError(f"{ALLOW} needs a name: tokenizer, data, seq_length or packing")
        allowed.append(rest[at + 1])
        del rest[at : at + 2]
    first_flag = next((i for i, text in enumerate(rest) if text.startswith("-")), len(rest))
    overrides = rest[:first_flag] + ([f"start.allow=[{', '.join(allowed)}]"] if allowed else [])
    return overrides, rest[first_flag:]


def check_flags(flags: Sequence[str], recipe: Recipe) -> None:
    """A Megatron flag that goes against the recipe would change the run behind its back."""
    owned = owned_flags(recipe)
    unfit = _unfit_for_graphs(recipe)
    for flag in (text.partition("=")[0] for text in flags):
        if flag in owned:
            raise UserError(f"{flag} is the recipe's to set{_key_of(flag)}, as an override before the Megatron flags")
        if flag in CUDA_GRAPHS and unfit:
            raise UserError(f"{flag}: {unfit}: leave the graphs out")


def _unfit_for_graphs(recipe: Recipe) -> str | None:
    """Why CUDA graphs cannot run a recipe, if so: they keep the attention pattern that was set when they were captured.

    Megatron captures once, and graphs of its layers take no `packed_seq_params` (core, transformer_layer.py).
    """
    for number, phase in enumerate(recipe.phases):
        if phase.per_sample:
            return f"CUDA graphs cannot take a pattern per sequence, which phases.{number} ({phase.label}) needs"
    if recipe.data.blocks_documents:
        return "CUDA graphs cannot take the documents of each sequence"
    directions = [view.direction for phase in recipe.phases for view in phase.views]
    directions += ["causal" if name == "clm" else "bidirectional" for name in recipe.validated]
    if len(set(directions)) > 1:
        needed = " and ".join(dict.fromkeys(directions))
        return f"CUDA graphs keep one attention pattern, the phases and their validation need {needed}"
    return None


def _key_of(flag: str) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    for section, field in Recipe.model_fields.items():
        if name == section or name in getattr(field.annotation, "model_fields", {}):
            return f": {section if name == section else f'{section}.{name}'}=..."
    return " (docs/recipes.md)"


def _vocabulary(tokenizer: Tokenizer, recipe: Recipe) -> Vocabulary:
    words = word_marks(tokenizer) if names_words(recipe.phases) else None
    return Vocabulary(tokenizer.vocab_size, tokenizer.mask_id, tuple(sorted(tokenizer.special_ids)), words)


def _open_streams(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Stream]:
    """Every indexed dataset that the recipe names, by its path."""
    sections = [*recipe.data.train, *recipe.data.valid, *(s for course in courses(recipe) for s in course.sources)]
    streams = {}
    for path in dict.fromkeys(section.path for section in sections):
        _check_sidecar(path, recipe, tokenizer)
        streams[path] = open_stream(path, recipe.model.seq_length, recipe.data.packing, tokenizer.fill_id)
    return streams


def _check_sidecar(prefix: str, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Data made by `mlmclm preprocess` says which tokenizer made it."""
    made_by = (read_sidecar(prefix) or {}).get("tokenizer_fingerprint")
    if made_by and made_by != tokenizer.fingerprint:
        raise UserError(
            f"{prefix}: the data was made with another tokenizer ({made_by[:12]}) than {recipe.data.tokenizer}"
            f" ({tokenizer.fingerprint[:12]}); preprocess it again or name its own tokenizer"
        )
