"""Which data each phase reads, and from where: it continues its stream, replays it, or has sources of its own."""

from dataclasses import dataclass

from megatron_mlmclm.recipe.phase import SourceSection
from megatron_mlmclm.recipe.schema import Recipe


@dataclass(frozen=True)
class Course:
    """The data of one phase: its sample k is the `place` + k-th sample of the blend of `sources`."""

    sources: tuple[SourceSection, ...]
    place: int


def courses(recipe: Recipe) -> list[Course]:
    """One a phase. A stream goes on where the last phase that read it stood; a replay starts over and moves nothing."""
    return _walk(recipe, recipe.last_sample)[0]


def place_after(recipe: Recipe, sample: int) -> int:
    """How far the run's own stream has been read after `sample` samples of the run."""
    return _walk(recipe, sample)[1]


def _walk(recipe: Recipe, until: int) -> tuple[list[Course], int]:
    own = tuple(recipe.data.train)
    read = {own: recipe.start.place if recipe.start and recipe.start.data == "continue" else 0}
    found = []
    for stretch in recipe.stretches:
        data = stretch.phase.data
        if data == "replay":
            found.append(Course(own, 0))
            continue
        sources = own if data == "continue" else tuple(data)
        found.append(Course(sources, read.setdefault(sources, 0)))
        read[sources] += max(0, min(stretch.end_sample, until) - stretch.first_sample)
    return found, read[own]
