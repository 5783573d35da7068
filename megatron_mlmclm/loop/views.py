"""From a recipe's phases and validation to views and a timeline."""

from collections.abc import Sequence

from megatron_mlmclm.attention import Pattern
from megatron_mlmclm.objectives import (
    Clm,
    Constant,
    Corruption,
    Diffusion,
    Mlm,
    Mntp,
    Objective,
    PseudoLikelihood,
    Ramp,
    Ratio,
    Steps,
    Vocabulary,
)
from megatron_mlmclm.phases import Choice, Phase, Timeline, View, alternating, mixed
from megatron_mlmclm.recipe import Recipe
from megatron_mlmclm.recipe.phase import CorruptionSection, PartSection, PhaseSection, RatioSchedule

MASKED = {"mlm": Mlm, "mntp": Mntp}


def timeline_of(recipe: Recipe, vocabulary: Vocabulary) -> Timeline:
    """The phases of a checked recipe, each with its place in the run and its views."""
    phases: list[Phase] = []
    first_view = 0
    for stretch in recipe.stretches:
        section = stretch.phase
        views = tuple(
            view_of(part, vocabulary, pattern_of(recipe, part.direction), stretch.steps, section.per_sample)
            for part in section.views
        )
        phases.append(
            Phase(
                ordinal=stretch.ordinal,
                name=section.label,
                views=views,
                first=stretch.first_sample,
                samples=stretch.samples,
                first_step=stretch.first_step,
                batch=stretch.batch.global_batch_size,
                first_view=first_view,
                **_choice(section, recipe.seed),
            )
        )
        first_view += len(views)
    return Timeline(phases)


def measured_views(recipe: Recipe, vocabulary: Vocabulary) -> list[View]:
    """What an evaluation looks through: each objective under its own attention, then each position hidden in turn."""
    ratio = recipe.validation.mask_ratio
    parts = [PartSection(objective=name, mask_ratio=None if name == "clm" else ratio) for name in recipe.validated]
    views = [view_of(part, vocabulary, pattern_of(recipe, part.direction)) for part in parts]
    if recipe.data.valid and recipe.validation.pseudo_perplexity:
        objective = PseudoLikelihood(vocabulary)
        views.append(View(objective.name, objective, pattern_of(recipe, objective.direction)))
    return views


def pattern_of(recipe: Recipe, direction: str) -> Pattern:
    """Who sees whom in a run's views of this direction: documents and window are those of the whole run."""
    model = recipe.model
    return Pattern(direction, recipe.data.blocks_documents, model.window_size, model.global_attn_every_n_layers)


def view_of(
    part: PartSection, vocabulary: Vocabulary, pattern: Pattern, steps: int = 1, per_sample: bool = False
) -> View:
    """The view that `part` describes, in a phase of `steps`.

    Raises:
        UserError: the tokenizer has no mask token, or does not tell words apart where whole words are asked for.
    """
    return View(part.label, _objective(part, vocabulary, steps), pattern, part.mask_seed, per_sample)


def _choice(section: PhaseSection, seed: int) -> dict[str, Choice]:
    if section.objective == "mixed":
        return {"choice": mixed([part.share for part in section.parts], seed, by_sample=section.by_sample)}
    if section.objective == "alternating":
        return {"choice": alternating([part.steps for part in section.parts])}
    return {}


def _objective(part: PartSection, vocabulary: Vocabulary, steps: int) -> Objective:
    if part.objective == "clm":
        return Clm(prefix=part.prefix)
    corruption = _corruption(part.corruption or CorruptionSection(), vocabulary)
    if part.objective == "diffusion":
        low, high = part.mask_ratio
        return Diffusion(corruption, low, high, weighted=part.weight is not None)
    return MASKED[part.objective](corruption, _ratio(part.mask_ratio, steps))


def _corruption(section: CorruptionSection, vocabulary: Vocabulary) -> Corruption:
    spans = {"span_mean": section.span.mean, "span_max": section.span.max} if section.span else {}
    shares = {"mask": section.mask, "random": section.random, "keep": section.keep}
    return Corruption(vocabulary, **shares, selection=section.selection, **spans)


def _ratio(ratio: float | RatioSchedule, steps: int) -> Ratio:
    if isinstance(ratio, float | int):
        return Constant(ratio)
    if ratio.at is not None:
        return Steps(ratio.at)
    return Ramp(ratio.start, ratio.end, ratio.steps or steps, ratio.shape)


def names_words(sections: Sequence[PhaseSection]) -> bool:
    """Whether any phase hides whole words: only then the tokenizer must tell them."""
    parts = [part for section in sections for part in section.views]
    return any(part.corruption is not None and part.corruption.selection == "words" for part in parts)
