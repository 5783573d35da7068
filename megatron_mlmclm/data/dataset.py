"""The n-th sample of a run, as a map-style dataset: a pure function that every rank evaluates for itself."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_mlmclm.data.blend import Blend
from megatron_mlmclm.data.stream import Stream
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import Objective, hash_key

# Under megatron's "single" loader the index is `consumed_samples`, and the sampler is a range: length costs nothing.
ENDLESS = 1 << 40


class Sources:
    """An endless blend of indexed datasets. `seed` orders it; `names` tell its sources apart in the keys of masks."""

    def __init__(
        self, streams: Sequence[Stream], weights: Sequence[float], seed: int, names: Sequence[int | str] = ()
    ) -> None:
        self.streams = tuple(streams)
        self.names = tuple(names) or tuple(range(len(streams)))
        self.blend = Blend([stream.n_samples for stream in streams], list(weights), seed)


class Reading(NamedTuple):
    """How one index is read: the `place`-th sample of `sources`, through view number `view` of the run.

    `step` is what the objective is told of time: the step of the phase, from 0.
    """

    sources: Sources
    place: int
    view: int
    objective: Objective
    mask_seed: int
    step: int


class EncoderDataset:
    """Samples keyed by (run seed, mask seed, source, epoch, index): no state, no index files, no global RNG.

    `reading_of` maps an index to its `Reading`. `vocab_size` bounds the ids: data made with a larger vocabulary is
    refused (UserError) at the first sample that shows it.
    """

    def __init__(self, seed: int, reading_of: Callable[[int], Reading], vocab_size: int) -> None:
        self._seed = seed
        self._reading_of = reading_of
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, n: int) -> dict[str, Any]:
        """Sample n: `inputs`, `labels` int64 [S], `predicted` bool [S], `view` and `prefix` int, `weight` float.

        Where the streams tell documents apart also `documents`, int64 [S]: the number of each position's document, from
        0 within the sample, -1 on padding, which comes last.
        """
        reading = self._reading_of(n)
        source, epoch, index = reading.sources.blend.locate(reading.place)
        stream, name = reading.sources.streams[source], reading.sources.names[source]
        tokens = stream.sample(index)
        largest = int(tokens.max())
        if largest >= self._vocab_size:
            prefix = stream.reader.prefix
            raise UserError(f"{prefix}: token id {largest} is not in the tokenizer's vocabulary of {self._vocab_size}")
        key = hash_key("mask", self._seed, reading.mask_seed, name, epoch, index)
        documents = stream.documents(index)
        sample = reading.objective.make(tokens, key, reading.step, documents)
        found = {
            "inputs": sample.inputs,
            "labels": sample.labels,
            "predicted": sample.predicted,
            "weight": sample.weight,
            "prefix": sample.prefix,
            "view": reading.view,
        }
        if documents is not None:
            found["documents"] = documents[:-1]
        return found
