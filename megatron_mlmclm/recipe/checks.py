"""Combinations that cannot work, found before anything is started. Each message names both numbers."""

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.phase import BatchSection, RatioSchedule, Stretch
from megatron_mlmclm.recipe.schema import Recipe


def check_recipe(recipe: Recipe, world_size: int | None, vocab_size: int) -> None:
    """Refuse what Megatron would fail on late or silently. `world_size` None: not known yet.

    Raises:
        UserError: one line with the keys and both numbers.
    """
    _check_model(recipe, vocab_size)
    _check_layout(recipe, recipe.model.vocab_size or vocab_size)
    _check_schedule(recipe)
    for stretch in recipe.stretches:
        _check_phase(recipe, stretch)
    for key, batch in _batches(recipe).items():
        _check_batch(recipe, key, batch)
        if world_size is not None:
            _check_world(recipe, key, batch, world_size)


def check_platform(recipe: Recipe, layers: str, has_apex: bool, has_liger: bool) -> None:
    """Refuse a run that lacks what it asks for, or could not be resumed.

    `layers` is "cpu", "cuda" (no Transformer Engine) or "te".

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
    if recipe.head == "fused" and (layers == "cpu" or not has_liger):
        missing = "a GPU" if layers == "cpu" else "liger-kernel (pip install 'megatron_mlmclm[liger]')"
        raise UserError(f"head: fused needs {missing}; head=auto takes what there is")
    if recipe.head == "fused" and recipe.parallel.tensor_model_parallel_size > 1:
        raise UserError("head: fused needs parallel.tensor_model_parallel_size=1; head=chunked has no such bound")


def _divides(divisor: int, number: int, what: str, by: str) -> None:
    if number % divisor:
        raise UserError(f"{what} ({number}) is not divisible by {by} ({divisor})")


def _check_model(recipe: Recipe, vocab_size: int) -> None:
    model = recipe.model
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size ({model.vocab_size}) is below the {vocab_size} ids of {recipe.data.tokenizer}: name the"
            " model's own tokenizer"
        )
    if model.kv_channels is None:
        _divides(model.num_attention_heads, model.hidden_size, "model.hidden_size", "model.num_attention_heads")
    _divides(model.kv_heads, model.num_attention_heads, "model.num_attention_heads", "model.num_query_groups")
    _check_window(recipe)
    if model.head_dim % 2:
        raise UserError(f"head dimension {model.head_dim} is odd: rotary embeddings need an even one")


def _check_window(recipe: Recipe) -> None:
    model = recipe.model
    if model.window_size is None:
        if model.global_attn_every_n_layers is not None:
            raise UserError(
                f"model.global_attn_every_n_layers ({model.global_attn_every_n_layers}) needs model.window_size:"
                " without a window every layer sees all"
            )
        return
    for number, phase in enumerate(recipe.phases):
        if any(view.direction == "prefix" for view in phase.views):
            raise UserError(
                f"phases.{number}: attention: prefix does not go with model.window_size {list(model.window_size)}, a"
                " prefix is seen whole: leave one of the two out"
            )


def _check_layout(recipe: Recipe, vocab_size: int) -> None:
    model, parallel = recipe.model, recipe.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    _divides(tp, model.num_attention_heads, "model.num_attention_heads", key)
    _divides(tp, model.kv_heads, "model.num_query_groups", key)
    _divides(tp, model.ffn_hidden_size, "model.ffn_hidden_size", key)
    cp = parallel.context_parallel_size
    if cp > 1:
        _divides(2 * cp, model.seq_length, "model.seq_length", "2 * parallel.context_parallel_size")
    chunks = pp * (parallel.num_virtual_stages_per_pipeline_rank or 1)
    _divides(chunks, model.num_layers, "model.num_layers", "pipeline stages")
    if parallel.num_virtual_stages_per_pipeline_rank and pp < 2:
        raise UserError(
            f"num_virtual_stages_per_pipeline_rank needs pipeline_model_parallel_size of 2 or more, it is {pp}"
        )
    if parallel.sequence_parallel:
        if tp < 2:
            raise UserError(f"parallel.sequence_parallel needs {key} of 2 or more, it is {tp}")
        share = "model.seq_length" if cp == 1 else "model.seq_length / parallel.context_parallel_size"
        _divides(tp, model.seq_length // cp, share, f"{key} under sequence_parallel")
    if model.padded_vocab_size is not None:
        if model.padded_vocab_size < vocab_size:
            raise UserError(
                f"model.padded_vocab_size ({model.padded_vocab_size}) is below the vocabulary's {vocab_size}"
            )
        _divides(tp, model.padded_vocab_size, "model.padded_vocab_size", key)


def _check_schedule(recipe: Recipe) -> None:
    optimizer = recipe.optimizer
    if optimizer.warmup_steps + optimizer.decay_steps > recipe.steps:
        raise UserError(
            f"optimizer.warmup_steps ({optimizer.warmup_steps}) + decay_steps ({optimizer.decay_steps}) exceed the"
            f" run's {recipe.steps} steps"
        )
    if optimizer.min_lr > optimizer.lr:
        raise UserError(f"optimizer.min_lr ({optimizer.min_lr}) is above optimizer.lr ({optimizer.lr})")
    if recipe.phases[0].optimizer == "reset" and recipe.start is None:
        raise UserError(
            "phases.0.optimizer: reset: there is no optimizer state before the first phase of a run from nothing;"
            " leave it out, or give start.from"
        )


def _check_phase(recipe: Recipe, stretch: Stretch) -> None:
    phase, key = stretch.phase, f"phases.{stretch.ordinal}"
    rule = phase.lr
    if rule and rule.warmup_steps + rule.decay_steps > stretch.steps:
        raise UserError(
            f"{key}.lr.warmup_steps ({rule.warmup_steps}) + decay_steps ({rule.decay_steps}) exceed the phase's"
            f" {stretch.steps} steps"
        )
    for number, view in enumerate(phase.views):
        part = f".parts.{number}" if phase.parts else ""
        if view.direction == "prefix" and recipe.data.packing != "cut":
            raise UserError(
                f"{key}{part}.attention: prefix takes a sample for one text, data.packing: {recipe.data.packing} tells"
                " its documents apart: set data.packing=cut, or leave attention and prefix out"
            )
        ratio = view.mask_ratio
        if isinstance(ratio, RatioSchedule) and ratio.last_change > stretch.steps:
            raise UserError(
                f"{key}{part}.mask_ratio needs {ratio.last_change} steps, the phase has {stretch.steps}: shorten the"
                " schedule or lengthen the phase"
            )
    missing = [unit for unit in sorted(phase.frozen) if _layer(unit) >= recipe.model.num_layers]
    if missing:
        raise UserError(f"{key}.freeze names {missing[0]}, the model's {recipe.model.num_layers} layers count from 0")


def _layer(unit: str) -> int:
    return int(unit.rpartition(".")[2]) if unit.startswith("layers.") else -1


def _batches(recipe: Recipe) -> dict[str, BatchSection]:
    """Every batch size of the run by its key in the recipe."""
    own = {f"phases.{n}.batch": phase.batch for n, phase in enumerate(recipe.phases) if phase.batch}
    return {"batch": recipe.batch, **own}


def _check_batch(recipe: Recipe, key: str, batch: BatchSection) -> None:
    _divides(batch.micro_batch_size, batch.global_batch_size, f"{key}.global_batch_size", f"{key}.micro_batch_size")
    if recipe.data.valid:
        of_it = "validation.samples * objectives + pseudo_perplexity * seq_length"
        _divides(batch.global_batch_size, recipe.validation.samples, "validation.samples", f"{key}.global_batch_size")
        _divides(batch.global_batch_size, recipe.evaluated_sequences, of_it, f"{key}.global_batch_size")


def _check_world(recipe: Recipe, key: str, batch: BatchSection, world_size: int) -> None:
    parallel = recipe.parallel
    model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    model_parallel *= parallel.context_parallel_size
    _divides(model_parallel, world_size, "number of processes", "tensor * pipeline * context parallel size")
    data_parallel = world_size // model_parallel
    step = batch.micro_batch_size * data_parallel
    _divides(step, batch.global_batch_size, f"{key}.global_batch_size", "micro_batch_size * data parallel size")
    if parallel.num_virtual_stages_per_pipeline_rank:
        pp = parallel.pipeline_model_parallel_size
        _divides(pp, batch.global_batch_size // step, "micro-batches per step", "pipeline_model_parallel_size")
