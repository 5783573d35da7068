"""A recipe as Megatron's own command-line flags. What the user adds after them wins, as Megatron's parser has it."""

from pathlib import Path

from megatron_mlmclm.recipe.phase import Segment
from megatron_mlmclm.recipe.schema import Recipe

# Where CUDA is absent: gloo, Megatron's own layers, and no fused kernels but those of `platform/kernels.py`.
CPU_FLAGS = [
    "--distributed-backend",
    "gloo",
    "--use-cpu-initialization",
    "--transformer-impl",
    "local",
    "--no-masked-softmax-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
]

# On GPUs without Transformer Engine (and so without apex's gradient accumulation kernel) the same layers are used.
LOCAL_GPU_FLAGS = [
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
]


# The learning rate of a step is the recipe's own (`recipe/rates.py`). Megatron keeps the peak rates as part of the name
# of each parameter group in a checkpoint, so here they are one constant: else a branch at another rate would not load.
RATE_FLAGS = ["--lr", 1.0, "--min-lr", 0.0, "--lr-decay-style", "constant"]
RATE_FLAGS_OF_MEGATRON = (
    *("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-init"),
    *("--lr-decay-iters", "--lr-decay-samples", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
    *("--lr-wsd-decay-style", "--decoupled-lr", "--decoupled-min-lr"),
)
# What a model has is the recipe's to say, and how its rotary frequencies are scaled ours to do (`model/rope.py`).
MODEL_FLAGS_OF_MEGATRON = (
    *("--add-qkv-bias", "--qk-layernorm", "--untie-embeddings-and-output-weights"),
    *("--use-rope-scaling", "--rope-scaling-factor", "--rotary-seq-len-interpolation-factor", "--rotary-percent"),
)


def megatron_flags(recipe: Recipe, segment: Segment, *, vocab_size: int, platform: str) -> list[str]:
    """The flags of a run up to the end of `segment`. `platform` is "cpu", "cuda" (no Transformer Engine) or "te"."""
    flags = [*_model(recipe, vocab_size), *_batch(recipe, segment), *_optimizer(recipe), *_layout(recipe)]
    flags += _files(recipe, segment)
    if platform == "te" and recipe.model.window_size is not None and recipe.parallel.context_parallel_size > 1:
        flags += ["--cp-comm-type", "all_gather"]  # TE's default, p2p, knows no windows
    flags += {"cpu": CPU_FLAGS, "cuda": LOCAL_GPU_FLAGS, "te": ["--transformer-impl", "transformer_engine"]}[platform]
    return [str(flag) for flag in flags]


def owned_flags(recipe: Recipe) -> set[str]:
    """Flags that the recipe alone may set: they decide what the samples, phases and weights are."""
    flags = [*_model(recipe, 0), *_batch(recipe, recipe.segment_after(0)), *_optimizer(recipe), *_layout(recipe)]
    flags += [*RATE_FLAGS_OF_MEGATRON, *MODEL_FLAGS_OF_MEGATRON, "--eval-iters", "--dataloader-type"]
    flags += ["--window-size", "--window-attn-skip-freq"]
    return {flag for flag in flags if isinstance(flag, str) and flag.startswith("--")}


def _model(recipe: Recipe, vocab_size: int) -> list:
    model = recipe.model
    flags = [
        *("--num-layers", model.num_layers, "--hidden-size", model.hidden_size),
        *("--ffn-hidden-size", model.ffn_hidden_size, "--num-attention-heads", model.num_attention_heads),
        *("--group-query-attention", "--num-query-groups", model.kv_heads, "--kv-channels", model.head_dim),
        *("--seq-length", model.seq_length, "--max-position-embeddings", model.seq_length),
        *("--position-embedding-type", "rope", "--rotary-base", model.rotary_base),
        *("--normalization", "RMSNorm", "--norm-epsilon", model.layernorm_epsilon, "--swiglu"),
        *("--disable-bias-linear", "--attention-dropout", 0, "--hidden-dropout", 0),
        *("--init-method-std", model.init_method_std),
        # Megatron's tokenizer does nothing here but carry the size; ids come from the indexed data.
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size),
    ]
    if model.window_size is not None:
        every = model.global_attn_every_n_layers
        left, right = model.window_size  # in brackets: a leading minus would look like a flag
        windowed = [int(every is None or layer % every != 0) for layer in range(model.num_layers)]
        layers = f"[{','.join(map(str, windowed))}]"
        flags += [*("--window-size", f"({left},{right})"), *("--window-attn-skip-freq", layers)]
    if not model.tie_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if model.add_qkv_bias:
        flags.append("--add-qkv-bias")
    if model.qk_layernorm:
        flags.append("--qk-layernorm")
    return flags


def _batch(recipe: Recipe, segment: Segment) -> list:
    return [
        *("--micro-batch-size", segment.batch.micro_batch_size),
        *("--global-batch-size", segment.batch.global_batch_size),
        *("--train-iters", segment.last_step, "--seed", recipe.seed),
    ]


def _optimizer(recipe: Recipe) -> list:
    optimizer = recipe.optimizer
    flags = [
        *("--optimizer", "adam", *RATE_FLAGS),
        *("--adam-beta1", optimizer.adam_beta1, "--adam-beta2", optimizer.adam_beta2),
        *("--adam-eps", optimizer.adam_eps, "--weight-decay", optimizer.weight_decay),
        *("--clip-grad", optimizer.clip_grad),
        "--calculate-per-token-loss",  # the only form whose gradient is the mean over predicted tokens
        "--override-opt_param-scheduler",  # a resumed or longer run follows its recipe, not the checkpoint's lengths
    ]
    if recipe.precision == "bf16":
        flags.append("--bf16")
    return flags


def _layout(recipe: Recipe) -> list:
    parallel = recipe.parallel
    flags = [
        *("--tensor-model-parallel-size", parallel.tensor_model_parallel_size),
        *("--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size),
        *("--context-parallel-size", parallel.context_parallel_size),
    ]
    if parallel.num_virtual_stages_per_pipeline_rank:
        flags += ["--num-virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank]
    if parallel.sequence_parallel:
        flags.append("--sequence-parallel")
    if parallel.use_distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    return flags


def _files(recipe: Recipe, segment: Segment) -> list:
    run = Path(recipe.output)
    return [
        *("--save", run / "checkpoints", "--save-interval", recipe.save_interval or recipe.last_step),
        *("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"),
        # At its interval Megatron's own log gathers timers behind a barrier; metrics.jsonl needs neither.
        *("--tensorboard-dir", run / "tensorboard", "--log-interval", recipe.log_interval),
        *("--dataloader-type", "single", "--num-workers", recipe.data.num_workers),
        *("--eval-interval", recipe.validation.interval),
        *("--eval-iters", recipe.evaluated_sequences // segment.batch.global_batch_size),
    ]
