"""The n-th sample of a run, as a map-style dataset: a pure function that every rank evaluates for itself."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_mlmclm.data.blend import Blend
from megatron_mlmclm.data.stream import TokenStream
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Objective, hash_key

# Under megatron's "single" loader the index is `consumed_samples`, and the sampler is a range: length costs nothing.
ENDLESS = 1 << 40


class Reading(NamedTuple):
    """How one index is read: the `place`-th sample of the blend, through view number `view`."""

    place: int
    view: int
    objective: Objective
    mask_seed: int


class EncoderDataset:
    """Samples keyed by (run seed, mask seed, source, epoch, index): no state, no index files, no global RNG.

    `reading_of` maps an index to its `Reading`. `vocab_size` bounds the ids: data made with a larger vocabulary is
    refused (UserError) at the first sample that shows it.
    """

    def __init__(
        self,
        streams: Sequence[TokenStream],
        weights: Sequence[float],
        seed: int,
        reading_of: Callable[[int], Reading],
        vocab_size: int,
    ) -> None:
        self._streams = tuple(streams)
        self._blend = Blend([stream.n_samples for stream in streams], list(weights), seed)
        self._seed = seed
        self._reading_of = reading_of
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, n: int) -> dict[str, np.ndarray | int]:
        """Sample n: `inputs` and `labels` int64 [S], `predicted` bool [S], `view` int."""
        place, view, objective, mask_seed = self._reading_of(n)
        source, epoch, index = self._blend.locate(place)
        tokens = self._streams[source].sample(index)
        largest = int(tokens.max())
        if largest >= self._vocab_size:
            prefix = self._streams[source].reader.prefix
            raise UserError(f"{prefix}: token id {largest} is not in the tokenizer's vocabulary of {self._vocab_size}")
        sample = objective.make(tokens, hash_key("mask", self._seed, mask_seed, source, epoch, index))
        return {"inputs": sample.inputs, "labels": sample.labels, "predicted": sample.predicted, "view": view}
