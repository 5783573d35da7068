"""What the user asked for: a recipe with overrides, checked against tokenizer and data, and extra Megatron flags."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mlmclm.attention import Pattern
from megatron_mlmclm.data import Tokenizer, TokenStream, read_sidecar
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Clm, Corruption, Mlm, Mntp, Objective, Vocabulary
from megatron_mlmclm.phases import Timeline, View
from megatron_mlmclm.recipe import Recipe, check_recipe, load_recipe, owned_flags
from megatron_mlmclm.recipe.schema import PhaseSection, SourceSection

MASKED = {"mlm": Mlm, "mntp": Mntp}


@dataclass(frozen=True)
class Request:
    """A checked run. `views` are the phases' followed by the validation's; a sample carries its view's number."""

    recipe: Recipe
    flags: tuple[str, ...]  # the user's own Megatron flags
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    timeline: Timeline
    views: tuple[View, ...]
    train: tuple[TokenStream, ...]
    valid: tuple[TokenStream, ...]


def read_request(path: str, extra: Sequence[str], world_size: int | None) -> Request:
    """Load the recipe at `path` with `extra` (`key=value` overrides first, then Megatron flags) and check it all.

    Raises:
        UserError: one line; nothing was written.
    """
    overrides, flags = _split(extra)
    recipe = load_recipe(path, overrides)
    _check_flags(flags, recipe)
    tokenizer = Tokenizer.load(recipe.data.tokenizer)
    check_recipe(recipe, world_size, tokenizer.vocab_size)
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.mask_id, tuple(sorted(tokenizer.special_ids)))
    timeline = _timeline(recipe, vocabulary)
    measured = [PhaseSection(objective=name, steps=1, mask_ratio=_ratio(name, recipe)) for name in recipe.validated]
    return Request(
        recipe=recipe,
        flags=tuple(flags),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        timeline=timeline,
        views=(*(phase.view for phase in timeline.phases), *(_view(phase, vocabulary) for phase in measured)),
        train=_streams(recipe.data.train, recipe, tokenizer),
        valid=_streams(recipe.data.valid, recipe, tokenizer),
    )


def _split(extra: Sequence[str]) -> tuple[list[str], list[str]]:
    """Everything before the first `--flag` is an override."""
    first_flag = next((i for i, text in enumerate(extra) if text.startswith("-")), len(extra))
    return list(extra[:first_flag]), list(extra[first_flag:])


def _check_flags(flags: Sequence[str], recipe: Recipe) -> None:
    """A Megatron flag that goes against the recipe would change the run behind its back."""
    owned = owned_flags(recipe)
    for flag in (text.partition("=")[0] for text in flags):
        if flag in owned:
            raise UserError(f"{flag} is the recipe's to set{_key_of(flag)}, as an override before the Megatron flags")


def _key_of(flag: str) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    for section, field in Recipe.model_fields.items():
        if name == section or name in getattr(field.annotation, "model_fields", {}):
            return f": {section if name == section else f'{section}.{name}'}=..."
    return " (docs/recipes.md)"


def _timeline(recipe: Recipe, vocabulary: Vocabulary) -> Timeline:
    parts = []
    for phase in recipe.phases:
        samples = phase.steps * recipe.batch.global_batch_size
        parts.append((phase.name or phase.objective, _view(phase, vocabulary), samples))
    return Timeline.of(parts)


def _ratio(name: str, recipe: Recipe) -> float | None:
    return None if name == "clm" else recipe.validation.mask_ratio


def _view(phase: PhaseSection, vocabulary: Vocabulary) -> View:
    objective = _objective(phase, vocabulary)
    return View(objective, Pattern(phase.attention or objective.direction), phase.mask_seed)


def _objective(phase: PhaseSection, vocabulary: Vocabulary) -> Objective:
    if phase.objective == "clm":
        return Clm()
    shares = phase.corruption.model_dump() if phase.corruption else {}
    return MASKED[phase.objective](Corruption(vocabulary, **shares), phase.mask_ratio)


def _streams(sources: Sequence[SourceSection], recipe: Recipe, tokenizer: Tokenizer) -> tuple[TokenStream, ...]:
    for source in sources:
        _check_sidecar(source.path, recipe, tokenizer)
    return tuple(TokenStream(source.path, recipe.model.seq_length) for source in sources)


def _check_sidecar(prefix: str, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Data made by `mlmclm preprocess` says which tokenizer made it."""
    made_by = (read_sidecar(prefix) or {}).get("tokenizer_fingerprint")
    if made_by and made_by != tokenizer.fingerprint:
        raise UserError(
            f"{prefix}: the data was made with another tokenizer ({made_by[:12]}) than {recipe.data.tokenizer}"
            f" ({tokenizer.fingerprint[:12]}); preprocess it again or name its own tokenizer"
        )
