"""What a run is, typed. Field names are Megatron's own, so that readers can search both trees."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(gt=0.0, le=1.0)]
ObjectiveName = Literal["clm", "mlm", "mntp"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """The Transformer: pre-norm RMSNorm, SwiGLU, RoPE, no biases, no dropout (paper, appendix table 1)."""

    num_layers: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive
    num_attention_heads: Positive
    num_query_groups: Positive | None = None  # KV heads; None: as many as heads
    kv_channels: Positive | None = None  # head dimension; None: hidden_size / num_attention_heads
    seq_length: Positive
    rotary_base: Positive = 10_000
    layernorm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    init_method_std: Annotated[float, Field(gt=0)] = 0.02
    tie_embeddings: bool = False
    padded_vocab_size: Positive | None = None  # rows of the embedding; None: the tokenizer's, to a multiple of 128 * tp

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads


class SourceSection(Section):
    """One indexed dataset (PREFIX of .bin and .idx) and its share of the samples."""

    path: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class DataSection(Section):
    """Tokenizer folder and indexed datasets, relative to where the command is run."""

    tokenizer: str
    train: Annotated[list[SourceSection], Field(min_length=1)]
    valid: list[SourceSection] = []
    num_workers: NonNegative = 0

    @field_validator("train", "valid", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        """`train: PREFIX` and `train: [PREFIX, ...]` are short for sources of weight 1."""
        entries = value if isinstance(value, list) else [value]
        return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


class BatchSection(Section):
    """Sequences per model replica and forward pass, and per optimizer step."""

    micro_batch_size: Positive
    global_batch_size: Positive


class CorruptionSection(Section):
    """What becomes of chosen tokens: the shares sum to 1. The paper masks all; BERT has 0.8, 0.1 and 0.1."""

    mask: Share = 1.0
    random: Share = 0.0
    keep: Share = 0.0
    selection: Literal["bernoulli", "exact"] = "bernoulli"

    @model_validator(mode="after")
    def _whole(self) -> "CorruptionSection":
        if abs(self.mask + self.random + self.keep - 1.0) > 1e-9:
            raise ValueError(f"mask {self.mask} + random {self.random} + keep {self.keep} must sum to 1")
        return self


class PhaseSection(Section):
    """One stretch of the run with one objective."""

    objective: ObjectiveName
    steps: Positive
    name: str | None = None
    mask_ratio: Ratio | None = None  # mlm and mntp; the paper's two-stage runs use 0.4
    corruption: CorruptionSection | None = None  # mlm and mntp; None: all chosen tokens become the mask
    attention: Literal["causal", "bidirectional"] | None = None  # None: the objective's own
    mask_seed: int = 0

    @model_validator(mode="after")
    def _masking_where_it_belongs(self) -> "PhaseSection":
        if self.objective != "clm" and self.mask_ratio is None:
            raise ValueError(f"an {self.objective} phase needs mask_ratio, e.g. 0.4")
        if self.objective == "clm" and not (self.mask_ratio is self.corruption is None):
            raise ValueError("mask_ratio and corruption are for mlm and mntp phases; a clm phase masks nothing")
        return self


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
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True


class ValidationSection(Section):
    """Fixed samples under fixed masks, the same for every run on the same data, so that curves compare."""

    interval: Positive = 100
    samples: Positive = 64
    objectives: Annotated[list[ObjectiveName], Field(min_length=1)] | None = None  # None: those of the phases
    mask_ratio: Ratio = 0.15


class Recipe(Section):
    """A whole run. See docs/recipes.md for each key."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output: str  # run folder
    seed: NonNegative = 1234
    precision: Literal["fp32", "bf16"] = "fp32"
    model: ModelSection
    data: DataSection
    batch: BatchSection
    phases: Annotated[list[PhaseSection], Field(min_length=1)]
    optimizer: OptimizerSection
    parallel: ParallelSection = ParallelSection()
    validation: ValidationSection = ValidationSection()
    log_interval: Positive = 10
    save_interval: Positive | None = None  # steps; None: at the end only

    @property
    def steps(self) -> int:
        """Optimizer steps in the whole run."""
        return sum(phase.steps for phase in self.phases)

    @property
    def validated(self) -> list[ObjectiveName]:
        """Objectives that an evaluation measures, each once; none without validation data."""
        if not self.data.valid:
            return []
        return list(dict.fromkeys(self.validation.objectives or [phase.objective for phase in self.phases]))
