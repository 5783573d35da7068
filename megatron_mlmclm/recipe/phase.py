"""What a phase of a run is, typed: an objective, its corruption, its length, and the rules that hold while it lasts."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(gt=0.0, le=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Attention = Literal["causal", "bidirectional", "prefix"]
ObjectiveName = Literal["clm", "mlm", "mntp", "diffusion"]
PhaseObjective = Literal["clm", "mlm", "mntp", "diffusion", "mixed", "alternating"]
FREEZABLE = re.compile(r"embedding|head|final_norm|layers\.(\d+)(?:-(\d+))?")


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class SourceSection(Section):
    """One indexed dataset (PREFIX of .bin and .idx) and its share of the samples."""

    path: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


def sources(value: object) -> object:
    """`PREFIX` and `[PREFIX, ...]` are short for sources of weight 1."""
    entries = value if isinstance(value, list) else [value]
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


class BatchSection(Section):
    """Sequences per model replica and forward pass, and per optimizer step."""

    micro_batch_size: Positive
    global_batch_size: Positive


class SpanSection(Section):
    """Lengths of spans, in tokens: geometric, cut off at `max`, with this mean."""

    mean: Annotated[float, Field(ge=1)] = 3.0
    max: Positive = 10

    @model_validator(mode="after")
    def _mean_below_max(self) -> "SpanSection":
        if self.mean > self.max:
            raise ValueError(f"mean {self.mean} is above max {self.max}")
        return self


class CorruptionSection(Section):
    """What becomes of chosen tokens: the shares sum to 1. The paper masks all; BERT has 0.8, 0.1 and 0.1."""

    mask: Share = 1.0
    random: Share = 0.0
    keep: Share = 0.0
    selection: Literal["bernoulli", "exact", "words", "spans"] = "bernoulli"
    span: SpanSection | None = None

    @model_validator(mode="after")
    def _whole(self) -> "CorruptionSection":
        if abs(self.mask + self.random + self.keep - 1.0) > 1e-9:
            raise ValueError(f"mask {self.mask} + random {self.random} + keep {self.keep} must sum to 1")
        if self.span is not None and self.selection != "spans":
            raise ValueError(f"span is for selection: spans, it is {self.selection}")
        return self


class RatioSchedule(Section):
    """A masking ratio that moves: from `start` to `end` over `steps` (None: the whole phase), or by a table `at`."""

    shape: Literal["linear", "cosine", "steps"] = "linear"
    start: Ratio | None = None
    end: Ratio | None = None
    steps: Positive | None = None
    at: dict[NonNegative, Ratio] | None = None  # first step in the phase, from 0 -> ratio from there on

    @model_validator(mode="after")
    def _one_form(self) -> "RatioSchedule":
        if self.shape == "steps":
            if not self.at or 0 not in self.at or self.start or self.end or self.steps:
                raise ValueError("shape: steps takes `at`, a table of first step: ratio that begins at step 0, alone")
        elif self.start is None or self.end is None or self.at is not None:
            raise ValueError(f"shape: {self.shape} takes `start` and `end`, and `steps` if not over the whole phase")
        return self

    @property
    def last_change(self) -> int:
        """How many steps of the phase the schedule needs; 0 where it stretches with the phase."""
        return max(self.at) + 1 if self.at else self.steps or 0


def _kind_of_ratio(value: object) -> str:
    if isinstance(value, dict | RatioSchedule):
        return "schedule"
    return "range" if isinstance(value, list | tuple) else "number"


MaskRatio = Annotated[
    Annotated[Ratio, Tag("number")]
    | Annotated[RatioSchedule, Tag("schedule")]
    | Annotated[tuple[Ratio, Ratio], Tag("range")],
    Discriminator(_kind_of_ratio),
]
TAGS = ("number", "schedule", "range")  # they show up in pydantic's error locations and are no keys


class PartSection(Section):
    """An objective with what belongs to it: all of a phase, or one of those that a phase mixes or alternates."""

    objective: ObjectiveName
    name: str | None = None
    mask_ratio: MaskRatio | None = None  # mlm and mntp; a range [low, high] for diffusion
    corruption: CorruptionSection | None = None  # None: all chosen tokens become the mask
    weight: Literal["inverse_ratio"] | None = None  # diffusion: each sequence's losses count 1 / its ratio
    attention: Attention | None = None  # None: the objective's own
    prefix: tuple[Ratio, Ratio] | None = None  # attention: prefix; shares of the sequence to draw its length from
    mask_seed: int = 0

    @model_validator(mode="after")
    def _settings_of_the_objective(self) -> "PartSection":
        _check_ratio(self)
        if (self.weight is not None) and self.objective != "diffusion":
            raise ValueError(f"weight is for diffusion phases, this one is {self.objective}")
        if self.attention == "prefix" and self.objective != "clm":
            raise ValueError(f"attention: prefix is for clm, this one is {self.objective}")
        if (self.prefix is not None) != (self.attention == "prefix"):
            raise ValueError("prefix, a range of shares such as [0.1, 0.9], and attention: prefix go together")
        if self.prefix and not self.prefix[0] <= self.prefix[1] < 1:
            raise ValueError(f"prefix {list(self.prefix)} must rise and stay below 1")
        return self

    @property
    def label(self) -> str:
        """Its name, or the objective's."""
        return self.name or self.objective

    @property
    def direction(self) -> str:
        """Who may see whom: as said, or the objective's own."""
        return self.attention or ("causal" if self.objective == "clm" else "bidirectional")


def _check_ratio(part: PartSection) -> None:
    name, ratio = part.objective, part.mask_ratio
    if name == "clm":
        if not (ratio is part.corruption is None):
            raise ValueError("mask_ratio and corruption are for mlm, mntp and diffusion; a clm phase masks nothing")
    elif ratio is None:
        which, example = ("a diffusion", "[0.1, 0.9]") if name == "diffusion" else (f"an {name}", "0.4")
        raise ValueError(f"{which} phase needs mask_ratio, e.g. {example}")
    elif isinstance(ratio, tuple) != (name == "diffusion"):
        raise ValueError("mask_ratio of diffusion, and of it alone, is a range [low, high]")
    elif isinstance(ratio, tuple) and ratio[0] > ratio[1]:
        raise ValueError(f"mask_ratio {list(ratio)} must rise")


class MixPart(PartSection):
    """One objective of a mixed phase (`share`, on any positive scale) or an alternating one (`steps` at a time)."""

    share: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    steps: Positive | None = None


class LrSection(Section):
    """A phase's own learning rate: up from `start`, hold, then down to `end` over the phase's last steps.

    `start` and `end` are fractions of the peak.
    """

    peak: Annotated[float, Field(gt=0)] | None = None  # None: optimizer.lr
    warmup_steps: NonNegative = 0
    start: Share = 0.0
    decay_steps: NonNegative = 0
    shape: Literal["linear", "cosine", "1-sqrt"] = "linear"  # of the decay
    end: Share = 0.0


class PhaseSection(PartSection):
    """One stretch of the run."""

    objective: PhaseObjective
    parts: list[MixPart] = []  # of mixed and alternating phases
    by: Literal["samples", "batches"] = "samples"  # what a mixed phase draws an objective for
    steps: Positive | None = None  # the length, in one of three units
    tokens: Annotated[float, Field(gt=0)] | None = None
    samples: Annotated[float, Field(gt=0)] | None = None
    batch: BatchSection | None = None  # None: the run's
    lr: LrSection | None = None  # None: the run's schedule
    optimizer: Literal["keep", "reset"] = "keep"
    freeze: list[str] = []  # embedding, head, final_norm, layers.3, layers.0-7
    data: Literal["continue", "replay"] | Annotated[list[SourceSection], Field(min_length=1)] = "continue"

    @field_validator("data", mode="before")
    @classmethod
    def _sources(cls, value: object) -> object:
        return value if value in ("continue", "replay") else sources(value)

    @field_validator("freeze")
    @classmethod
    def _known_units(cls, value: list[str]) -> list[str]:
        for unit in value:
            if not FREEZABLE.fullmatch(unit):
                raise ValueError(f"{unit!r} cannot be frozen: name embedding, head, final_norm, layers.3 or layers.0-7")
        return value

    @model_validator(mode="after")
    def _settings_of_the_objective(self) -> "PhaseSection":
        if sum(length is not None for length in (self.steps, self.tokens, self.samples)) > 1:
            raise ValueError("give one length: steps, tokens or samples")
        if self.objective not in ("mixed", "alternating"):
            if self.parts or self.by != "samples":
                raise ValueError(f"parts and by are for mixed and alternating phases, this one is {self.objective}")
            return super()._settings_of_the_objective()
        own = (self.mask_ratio, self.corruption, self.weight, self.attention, self.prefix)
        if any(setting is not None for setting in own):
            raise ValueError(
                f"the parts of a phase that is {self.objective} have the mask_ratio, corruption, attention"
            )
        _check_parts(self)
        return self

    @property
    def views(self) -> list[PartSection]:
        """The objectives that the phase trains: its parts, or itself."""
        return [*self.parts] or [self]

    @property
    def per_sample(self) -> bool:
        """Whether the sequences of one batch may differ in who sees whom."""
        return self.by_sample or any(view.direction == "prefix" for view in self.views)

    @property
    def by_sample(self) -> bool:
        """Whether each sequence draws its objective."""
        return self.objective == "mixed" and self.by == "samples"

    @property
    def frozen(self) -> frozenset[str]:
        """Units that do not learn: embedding, head, final_norm, layers.I."""
        units: set[str] = set()
        for unit in self.freeze:
            first, last = FREEZABLE.fullmatch(unit).groups()
            if first is None:
                units.add(unit)
            else:
                units |= {f"layers.{i}" for i in range(int(first), int(last or first) + 1)}
        return frozenset(units)


def _check_parts(phase: PhaseSection) -> None:
    key, other = ("share", "steps") if phase.objective == "mixed" else ("steps", "share")
    if len(phase.parts) < 2:
        raise ValueError(f"a phase that is {phase.objective} needs two or more parts")
    for part in phase.parts:
        if getattr(part, key) is None or getattr(part, other) is not None:
            raise ValueError(f"each part of a phase that is {phase.objective} has {key}, and no {other}")
    labels = [part.label for part in phase.parts]
    if len(set(labels)) < len(labels):
        raise ValueError(f"parts {', '.join(labels)}: give those with one objective a name each")
    if phase.objective == "alternating" and phase.by != "samples":
        raise ValueError("by is for mixed phases")


@dataclass(frozen=True)
class Stretch:
    """A phase with its place in the run: optimizer steps [first_step, last_step] from 1, samples from first_sample."""

    ordinal: int
    phase: PhaseSection
    batch: BatchSection
    first_step: int
    steps: int
    first_sample: int

    @property
    def last_step(self) -> int:
        """The phase's last step."""
        return self.first_step + self.steps - 1

    @property
    def samples(self) -> int:
        """Sequences in the phase."""
        return self.steps * self.batch.global_batch_size

    @property
    def end_sample(self) -> int:
        """One past the phase's last sample."""
        return self.first_sample + self.samples


def steps_of(phase: PhaseSection, batch: BatchSection, seq_length: int) -> int | None:
    """Whole optimizer steps that hold the phase's length; None where it has none yet."""
    if phase.tokens is not None:
        return math.ceil(phase.tokens / (batch.global_batch_size * seq_length))
    if phase.samples is not None:
        return math.ceil(phase.samples / batch.global_batch_size)
    return phase.steps


@dataclass(frozen=True)
class Segment:
    """Neighbouring phases with one batch size: what one process can train without starting anew."""

    batch: BatchSection
    first_step: int
    last_step: int


def segments_of(stretches: list[Stretch]) -> list[Segment]:
    """Cut a run where the batch size changes: Megatron fixes it for the life of a process."""
    segments: list[Segment] = []
    for stretch in stretches:
        if segments and segments[-1].batch == stretch.batch:
            segments[-1] = Segment(stretch.batch, segments[-1].first_step, stretch.last_step)
        else:
            segments.append(Segment(stretch.batch, stretch.first_step, stretch.last_step))
    return segments
