"""Combinations that cannot work, found before anything is started. Each message names both numbers."""

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.schema import Recipe


def check_recipe(recipe: Recipe, world_size: int | None, vocab_size: int) -> None:
    """Refuse what Megatron would fail on late or silently. `world_size` None: not known yet.

    Raises:
        UserError: one line with the keys and both numbers.
    """
    _check_model(recipe)
    _check_layout(recipe, vocab_size)
    _check_schedule(recipe)
    if world_size is not None:
        _check_world(recipe, world_size)


def check_platform(recipe: Recipe, layers: str, has_apex: bool) -> None:
    """Refuse a run that could not be resumed. `layers` is "cpu", "cuda" (no Transformer Engine) or "te".

    On a GPU with neither Transformer Engine nor apex Megatron takes torch's AdamW, whose state its distributed
    optimizer saves but cannot load: it looks for one step per group, torch keeps one per parameter.

    Raises:
        UserError: says what to install or set.
    """
    if layers == "cuda" and recipe.parallel.use_distributed_optimizer and not has_apex:
        raise UserError(
            "parallel.use_distributed_optimizer on a GPU needs Transformer Engine or NVIDIA's apex (its checkpoints"
            " would not load): install one, or set parallel.use_distributed_optimizer=false"
        )


def _divides(divisor: int, number: int, what: str, by: str) -> None:
    if number % divisor:
        raise UserError(f"{what} ({number}) is not divisible by {by} ({divisor})")


def _check_model(recipe: Recipe) -> None:
    model = recipe.model
    if model.kv_channels is None:
        _divides(model.num_attention_heads, model.hidden_size, "model.hidden_size", "model.num_attention_heads")
    _divides(model.kv_heads, model.num_attention_heads, "model.num_attention_heads", "model.num_query_groups")
    if model.head_dim % 2:
        raise UserError(f"head dimension {model.head_dim} is odd: rotary embeddings need an even one")


def _check_layout(recipe: Recipe, vocab_size: int) -> None:
    model, parallel = recipe.model, recipe.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    _divides(tp, model.num_attention_heads, "model.num_attention_heads", key)
    _divides(tp, model.kv_heads, "model.num_query_groups", key)
    _divides(tp, model.ffn_hidden_size, "model.ffn_hidden_size", key)
    chunks = pp * (parallel.num_virtual_stages_per_pipeline_rank or 1)
    _divides(chunks, model.num_layers, "model.num_layers", "pipeline stages")
    if parallel.num_virtual_stages_per_pipeline_rank and pp < 2:
        raise UserError(
            f"num_virtual_stages_per_pipeline_rank needs pipeline_model_parallel_size of 2 or more, it is {pp}"
        )
    if parallel.sequence_parallel:
        if tp < 2:
            raise UserError(f"parallel.sequence_parallel needs {key} of 2 or more, it is {tp}")
        _divides(tp, model.seq_length, "model.seq_length", f"{key} under sequence_parallel")
    if model.padded_vocab_size is not None:
        if model.padded_vocab_size < vocab_size:
            raise UserError(
                f"model.padded_vocab_size ({model.padded_vocab_size}) is below the tokenizer's {vocab_size}"
            )
        _divides(tp, model.padded_vocab_size, "model.padded_vocab_size", key)


def _check_schedule(recipe: Recipe) -> None:
    optimizer, batch = recipe.optimizer, recipe.batch
    if optimizer.warmup_steps + optimizer.decay_steps > recipe.steps:
        raise UserError(
            f"optimizer.warmup_steps ({optimizer.warmup_steps}) + decay_steps ({optimizer.decay_steps}) exceed the"
            f" run's {recipe.steps} steps"
        )
    if optimizer.min_lr > optimizer.lr:
        raise UserError(f"optimizer.min_lr ({optimizer.min_lr}) is above optimizer.lr ({optimizer.lr})")
    _divides(batch.micro_batch_size, batch.global_batch_size, "batch.global_batch_size", "batch.micro_batch_size")
    if recipe.data.valid:
        _divides(batch.global_batch_size, recipe.validation.samples, "validation.samples", "batch.global_batch_size")


def _check_world(recipe: Recipe, world_size: int) -> None:
    parallel, batch = recipe.parallel, recipe.batch
    model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    _divides(model_parallel, world_size, "number of processes", "tensor * pipeline parallel size")
    data_parallel = world_size // model_parallel
    step = batch.micro_batch_size * data_parallel
    _divides(step, batch.global_batch_size, "batch.global_batch_size", "micro_batch_size * data parallel size")
    if parallel.num_virtual_stages_per_pipeline_rank:
        pp = parallel.pipeline_model_parallel_size
        _divides(pp, batch.global_batch_size // step, "micro-batches per step", "pipeline_model_parallel_size")
