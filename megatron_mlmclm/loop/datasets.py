"""Training and validation datasets for Megatron's loop. Every rank builds them: nothing is broadcast."""

from collections.abc import Callable

from megatron_mlmclm.data import EncoderDataset, Reading
from megatron_mlmclm.loop.request import Request

VALIDATION_SEED = 0  # fixed: validation curves of all runs on the same data compare


def datasets_provider(request: Request) -> Callable[..., tuple]:
    """A `train_valid_test_datasets_provider`. The test set is always None."""

    def provide(_num_samples: object, vp_stage: int | None = None) -> tuple:  # noqa: ARG001 - megatron passes it
        return train_dataset(request), validation_dataset(request) if request.valid else None, None

    provide.is_distributed = True  # else only tensor parallel rank 0 would build loaders
    return provide


def train_dataset(request: Request) -> EncoderDataset:
    """Sample n of the run, seen through the phase it falls into."""

    def reading_of(n: int) -> Reading:
        phase = request.timeline.at(n)
        return Reading(n, phase.ordinal, phase.view.objective, phase.view.mask_seed)

    weights = [source.weight for source in request.recipe.data.train]
    return EncoderDataset(request.train, weights, request.recipe.seed, reading_of, request.vocabulary.size)


def validation_dataset(request: Request) -> EncoderDataset:
    """One period of `samples` sequences per objective, over and over: each evaluation sees exactly one period."""
    samples, first = request.recipe.validation.samples, len(request.timeline.phases)
    views = request.views[first:]

    def reading_of(n: int) -> Reading:
        which, place = divmod(n % (samples * len(views)), samples)
        return Reading(place, first + which, views[which].objective, views[which].mask_seed)

    weights = [source.weight for source in request.recipe.data.valid]
    return EncoderDataset(request.valid, weights, VALIDATION_SEED, reading_of, request.vocabulary.size)
