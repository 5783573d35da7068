"""Training and validation datasets for Megatron's loop. Every rank builds them: nothing is broadcast."""

from collections.abc import Callable

from megatron_mlmclm.data import EncoderDataset, Reading, Sources
from megatron_mlmclm.loop.request import Request
from megatron_mlmclm.objectives import hash_key
from megatron_mlmclm.recipe import courses

VALIDATION_SEED = 0  # fixed: validation curves of all runs on the same data compare


def datasets_provider(request: Request) -> Callable[..., tuple]:
    """A `train_valid_test_datasets_provider`. The test set is always None."""

    def provide(_num_samples: object, vp_stage: int | None = None) -> tuple:  # noqa: ARG001 - megatron passes it
        return train_dataset(request), validation_dataset(request) if request.recipe.data.valid else None, None

    provide.is_distributed = True  # else only tensor parallel rank 0 would build loaders
    return provide


def train_dataset(request: Request) -> EncoderDataset:
    """Sample n of the run, seen through the phase it falls into."""
    timeline = request.timeline
    read = [(_sources(request, course.sources), course.place) for course in courses(request.recipe)]

    def reading_of(n: int) -> Reading:
        phase = timeline.at(n)
        number = phase.view_number(n)
        view = phase.views[number]
        sources, place = read[phase.ordinal]
        at, step = place + n - phase.first, phase.step(n)
        return Reading(sources, at, phase.first_view + number, view.objective, view.mask_seed, step)

    return EncoderDataset(request.recipe.seed, reading_of, request.vocabulary.size)


def _sources(request: Request, sections: tuple) -> Sources:
    """The run's own sources in order; others are known by their content, whatever phase or run reads them."""
    recipe = request.recipe
    streams = [request.streams[section.path] for section in sections]
    weights = [section.weight for section in sections]
    if sections == tuple(recipe.data.train):
        return Sources(streams, weights, recipe.seed)
    names = [stream.fingerprint for stream in streams]
    return Sources(streams, weights, hash_key("sources", recipe.seed, *names, bits=64), names)


def validation_dataset(request: Request) -> EncoderDataset:
    """One period of `samples` sequences per objective, over and over: each evaluation sees exactly one period.

    For a pseudo-perplexity each of its samples follows once per position, with that position hidden.
    """
    recipe = request.recipe
    samples, period = recipe.validation.samples, recipe.evaluated_sequences
    sections = recipe.data.valid
    sources = Sources([request.streams[s.path] for s in sections], [s.weight for s in sections], VALIDATION_SEED)
    first = len(request.timeline.views)
    views, last = request.views[first:], len(recipe.validated)

    def reading_of(n: int) -> Reading:
        which, place = divmod(n % period, samples)
        step = 0
        if which >= last:
            place, step = divmod(n % period - last * samples, recipe.model.seq_length)
            which = last
        view = views[which]
        return Reading(sources, place, first + which, view.objective, view.mask_seed, step)

    return EncoderDataset(VALIDATION_SEED, reading_of, request.vocabulary.size)
