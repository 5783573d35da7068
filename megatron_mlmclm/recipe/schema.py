"""What a run is, typed. Field names are Megatron's own, so that readers can search both trees."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.phase import (
    BatchSection,
    NonNegative,
    ObjectiveName,
    PhaseSection,
    Positive,
    Ratio,
    Section,
    Segment,
    SourceSection,
    Stretch,
    segments_of,
    sources,
    steps_of,
)

Window = tuple[Annotated[int, Field(ge=-1)], Annotated[int, Field(ge=-1)]]


class RopeScalingSection(Section):
    """How rotary frequencies are stretched for longer contexts; names and meanings are Hugging Face's."""

    rope_type: Literal["linear", "llama3"]
    factor: Annotated[float, Field(gt=0)]
    low_freq_factor: Annotated[float, Field(gt=0)] | None = None  # llama3: wavelengths above original / low are divided
    high_freq_factor: Annotated[float, Field(gt=0)] | None = None  # llama3: those below original / high are kept
    original_max_position_embeddings: Positive | None = None

    @model_validator(mode="after")
    def _settings_of_the_type(self) -> "RopeScalingSection":
        own = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if any((value is None) == (self.rope_type == "llama3") for value in own):
            raise ValueError(
                "low_freq_factor, high_freq_factor and original_max_position_embeddings go with rope_type: llama3, all"
            )
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor")
        return self


class ModelSection(Section):
    """The Transformer: pre-norm RMSNorm, SwiGLU, RoPE, no dropout (paper, appendix table 1).

    Of a run that starts from a Hugging Face folder, all but seq_length and padded_vocab_size is read from there.
    """

    num_layers: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive
    num_attention_heads: Positive
    num_query_groups: Positive | None = None  # KV heads; None: as many as heads
    kv_channels: Positive | None = None  # head dimension; None: hidden_size / num_attention_heads
    seq_length: Positive
    window_size: Window | None = None  # [left, right] neighbours that are seen, -1: no bound; a number is both
    global_attn_every_n_layers: Positive | None = None  # with a window: the first and every n-th from it see all
    rotary_base: Positive = 10_000
    rope_scaling: RopeScalingSection | None = None
    layernorm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    init_method_std: Annotated[float, Field(gt=0)] = 0.02
    tie_embeddings: bool = False
    add_qkv_bias: bool = False  # as Qwen2 has
    qk_layernorm: bool = False  # on each head's queries and keys, as Qwen3 has
    vocab_size: Positive | None = None  # ids that the model knows; None: as many as the tokenizer
    padded_vocab_size: Positive | None = None  # rows of the embedding; None: the tokenizer's, to a multiple of 128 * tp

    @field_validator("window_size", mode="before")
    @classmethod
    def _both_sides(cls, value: object) -> object:
        return [value, value] if isinstance(value, int) and not isinstance(value, bool) else value

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads


class DataSection(Section):
    """Tokenizer folder and indexed datasets, relative to where the command is run."""

    tokenizer: str
    train: Annotated[list[SourceSection], Field(min_length=1)]
    valid: list[SourceSection] = []
    packing: Literal["cut", "documents", "packed"] = "cut"  # how documents become samples; packed: `mlmclm pack` first
    num_workers: NonNegative = 0

    @property
    def blocks_documents(self) -> bool:
        """Whether a position sees its own document alone: samples then say where documents end."""
        return self.packing != "cut"

    @field_validator("train", "valid", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return sources(value)


class OptimizerSection(Section):
    """AdamW (paper: betas 0.9/0.95, eps 1e-5, weight decay 0.1, clip 1.0, peak learning rate 5e-4)."""

    lr: Annotated[float, Field(gt=0)]
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_eps: Annotated[float, Field(gt=0)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    warmup_steps: NonNegative = 0  # WSD over the whole run: linear up, hold, linear down over the last decay_steps
    decay_steps: NonNegative = 0


class ParallelSection(Section):
    """How the model is cut. Data parallel size is what is left of the world."""

    tensor_model_parallel_size: Positive = 1
    pipeline_model_parallel_size: Positive = 1
    num_virtual_stages_per_pipeline_rank: Positive | None = None
    context_parallel_size: Positive = 1  # ranks that share each sequence
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True


class ValidationSection(Section):
    """Fixed samples under fixed masks, the same for every run on the same data, so that curves compare."""

    interval: Positive = 100
    samples: Positive = 64
    objectives: Annotated[list[ObjectiveName], Field(min_length=1)] | None = None  # None: those of the phases
    mask_ratio: Ratio = 0.15
    pseudo_perplexity: NonNegative = 0  # samples of which each token is hidden in turn: seq_length sequences a sample


class StartSection(Section):
    """Where a run begins other than from nothing: a Hugging Face model, or a checkpoint, whose steps it counts on.

    `step`, `sample` and `place` are what the checkpoint says, filled in when it is read: finished steps, samples seen,
    and the place in the data to go on from. All are 0 for a Hugging Face model, imported or not.
    """

    checkpoint: str | None = Field(default=None, alias="from")  # run folder, checkpoints folder or iter_N folder
    hf: str | None = None  # folder with config.json and safetensors: its weights, step 0, a fresh optimizer
    data: Literal["continue", "restart"] = "continue"
    allow: list[Literal["tokenizer", "data", "seq_length", "packing"]] = []  # what may differ from the checkpoint's run
    step: NonNegative = 0
    sample: NonNegative = 0
    place: NonNegative = 0

    @model_validator(mode="after")
    def _one_source(self) -> "StartSection":
        if (self.checkpoint is None) == (self.hf is None):
            raise ValueError("give either from (a checkpoint) or hf (a Hugging Face folder)")
        return self

    @property
    def source(self) -> str:
        """The checkpoint or folder."""
        return self.checkpoint or self.hf


class ComputeSection(Section):
    """A budget taken from another recipe; the one phase without a length gets what is left of it."""

    equal: Literal["tokens", "predicted tokens", "FLOPs"]
    to: str  # recipe file or preset


class Recipe(Section):
    """A whole run. See docs/recipes.md for each key."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output: str  # run folder
    seed: NonNegative = 1234
    precision: Literal["fp32", "bf16"] = "fp32"
    # How the output layer's logits are had: those of predicted positions, whole or in chunks of the vocabulary, or all.
    head: Literal["auto", "whole", "chunked", "fused", "dense"] = "auto"
    model: ModelSection
    data: DataSection
    batch: BatchSection
    phases: Annotated[list[PhaseSection], Field(min_length=1)]
    optimizer: OptimizerSection
    parallel: ParallelSection = ParallelSection()
    validation: ValidationSection = ValidationSection()
    start: StartSection | None = None
    compute: ComputeSection | None = None
    log_interval: Positive = 10
    save_interval: Positive | None = None  # steps; None: at the end only

    @property
    def stretches(self) -> list[Stretch]:
        """The phases end to end, after the steps and samples of the checkpoint that the run starts from.

        Raises:
            UserError: a phase has no length.
        """
        step, sample = (self.start.step, self.start.sample) if self.start else (0, 0)
        found = []
        for ordinal, phase in enumerate(self.phases):
            batch = phase.batch or self.batch
            steps = steps_of(phase, batch, self.model.seq_length)
            if steps is None:
                raise UserError(f"phases.{ordinal} has no length: give it steps, tokens or samples")
            found.append(Stretch(ordinal, phase, batch, step + 1, steps, sample))
            step, sample = found[-1].last_step, found[-1].end_sample
        return found

    @property
    def first_step(self) -> int:
        """The run's first optimizer step, from 1."""
        return (self.start.step if self.start else 0) + 1

    @property
    def last_step(self) -> int:
        """The run's last optimizer step, counted from where its trunk began."""
        return self.stretches[-1].last_step

    @property
    def last_sample(self) -> int:
        """One past the run's last sample, counted likewise."""
        return self.stretches[-1].end_sample

    @property
    def steps(self) -> int:
        """Optimizer steps of the run itself."""
        return self.last_step - self.first_step + 1

    def segment_after(self, step: int) -> Segment:
        """What to train next after `step` finished steps; the last segment where all are done."""
        segments = segments_of(self.stretches)
        return next((each for each in segments if step < each.last_step), segments[-1])

    def stretch_at(self, step: int) -> Stretch:
        """The phase that `step` (from 1) belongs to; the last one also past the end."""
        stretches = self.stretches
        return next((each for each in stretches if step <= each.last_step), stretches[-1])

    @property
    def validated(self) -> list[ObjectiveName]:
        """Objectives that an evaluation measures, each once; none without validation data.

        What a diffusion phase learns is measured as mlm: under one fixed ratio, so that curves compare.
        """
        if not self.data.valid:
            return []
        trained = [view.objective for phase in self.phases for view in phase.views]
        names = self.validation.objectives or trained
        return list(dict.fromkeys("mlm" if name == "diffusion" else name for name in names))

    @property
    def evaluated_sequences(self) -> int:
        """Sequences that one evaluation reads."""
        if not self.data.valid:
            return 0
        hidden_in_turn = self.validation.pseudo_perplexity * self.model.seq_length
        return self.validation.samples * len(self.validated) + hidden_in_turn
