"""A run: everything of ours is hung on Megatron's seams, then its own `pretrain` does the work."""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_mlmclm.attention import te_refusal
from megatron_mlmclm.convert import fill_weights, open_source
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.datasets import datasets_provider
from megatron_mlmclm.loop.folder import record_run
from megatron_mlmclm.loop.forward import ForwardStep
from megatron_mlmclm.loop.progress import Progress
from megatron_mlmclm.loop.request import Request
from megatron_mlmclm.loop.start import has_begun, load_flags
from megatron_mlmclm.loop.steps import Steps
from megatron_mlmclm.loop.validation import Evaluation, collector
from megatron_mlmclm.loop.views import pattern_of
from megatron_mlmclm.model import form_of, model_config
from megatron_mlmclm.phases import Freezer, wrap_train_step
from megatron_mlmclm.platform import transformer_implementation
from megatron_mlmclm.platform.ceiling import matmul_ceiling
from megatron_mlmclm.recipe import Segment, dump_recipe, megatron_flags


def run(request: Request, segment: Segment, terminal: TextIO, is_last_rank: bool) -> None:
    """Train `request` to the end of `segment`, from the newest checkpoint in its run folder or from its start."""
    recipe, freezer = request.recipe, Freezer()
    with _refusals():
        args = _megatron_arguments(request, segment)
        _check_attention(request, args)
        config = model_config(
            args,
            vocab_size=request.model_vocab_size,
            padded_vocab_size=recipe.model.padded_vocab_size,
            init_std=recipe.model.init_method_std,
            pattern=pattern_of(recipe, "bidirectional"),  # each phase sets its own
            finalize_model_grads=freezer.finalize,
            rope_scaling=recipe.model.rope_scaling,
            weights=_weights(request),
        )
    args.mlmclm_recipe = dump_recipe(recipe)  # Megatron saves its arguments in every checkpoint
    args.mlmclm_origin = request.origin
    if args.rank == 0:
        record_run(recipe)
        if segment.first_step == recipe.first_step:
            said = [args.mlmclm_recipe, *_padding(request), *_heads(request, config)]
            print(*said, sep="\n", file=terminal, flush=True)
    progress = None
    if is_last_rank:
        # Of all ranks, as if each were as fast as this one: they wait for it here.
        ceiling = args.world_size * matmul_ceiling(args.params_dtype)
        progress = Progress(recipe, terminal, request.model_vocab_size, ceiling)
    forward_step = ForwardStep(request.views, len(request.timeline.views), request.model_vocab_size, recipe.head)
    steps = Steps(request, forward_step, freezer, progress)
    wrap_train_step(steps.start, steps.end)
    pretrain(
        pretrain_cfg_container_from_args(args, config),
        datasets_provider(request),
        ModelType.encoder_or_decoder,
        forward_step,
        non_loss_data_func=collector(forward_step, _evaluated(request, progress) if progress else None),
    )
    if progress and segment.last_step == recipe.last_step:
        progress.end()


def _padding(request: Request) -> list[str]:
    """A line for each dataset whose packing leaves positions empty."""
    streams = request.streams.items()
    return [f"{path}: {stream.padding:.2%} of positions are padding\n" for path, stream in streams if stream.padding]


def _heads(request: Request, config: GPTModelConfig) -> list[str]:
    """A line for each phase: how its logits are had, and how many rows by columns of them a rank has."""
    recipe, lines = request.recipe, []
    columns, tp = config.vocab_size, recipe.parallel.tensor_model_parallel_size
    if config.should_pad_vocab:
        columns = calculate_padded_vocab_size(columns, config.make_vocab_size_divisible_by, tp, logging_enabled=False)
    for stretch in recipe.stretches:
        phase = request.timeline.phases[stretch.ordinal]
        positions = stretch.batch.micro_batch_size * recipe.model.seq_length // recipe.parallel.context_parallel_size
        rows = max(view.objective.capacity(positions) for view in phase.views)
        form = form_of(recipe.head, tp)
        rows = f"{positions:,}" if form == "dense" else f"up to {rows:,}"
        lines.append(f"head of phase {stretch.ordinal}: {rows} of {positions:,} positions x {columns // tp:,}, {form}")
    return lines


def _weights(request: Request) -> Callable[[list], list] | None:
    """What fills the model where the run starts from a Hugging Face folder and has no checkpoint of its own yet."""
    recipe = request.recipe
    if recipe.start is None or recipe.start.hf is None or has_begun(recipe):
        return None
    source = open_source(recipe.start.hf)
    return partial(fill_weights, source=source, model=recipe.model, vocab_size=request.model_vocab_size)


def _megatron_arguments(request: Request, segment: Segment) -> argparse.Namespace:
    """The recipe's flags and then the user's, through Megatron's own parser."""
    layers = transformer_implementation()
    flags = megatron_flags(request.recipe, segment, vocab_size=request.model_vocab_size, platform=layers)
    sys.argv = [sys.argv[0], *flags, *load_flags(request.recipe, request.trunk), *request.flags]
    return parse_and_validate_args()


def _check_attention(request: Request, args: argparse.Namespace) -> None:
    """Refuse a pattern that Transformer Engine cannot do, where the run asks for its layers."""
    if args.transformer_impl != "transformer_engine":
        return
    for view in request.views:
        reason = te_refusal(view.pattern, args.context_parallel_size)
        if reason:
            raise UserError(f"{view.name}: {reason}")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Megatron's reasons for refusing arguments as one line, without its pages of usage.

    Raises:
        UserError: Megatron knows no such flag, or refuses the combination.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        raise UserError(f"Megatron: {said.getvalue().strip().rpartition('error: ')[2]}") from None
    except (AssertionError, ValueError) as error:
        raise UserError(f"Megatron: {error or 'an assertion of its argument check failed'}") from error


def _evaluated(request: Request, progress: Progress) -> Callable[[int, Evaluation], None]:
    def report(consumed: int, evaluation: Evaluation) -> None:
        phase = request.timeline.at(consumed - 1)
        progress.evaluation(phase.first_step + phase.step(consumed - 1), phase, evaluation)

    return report
