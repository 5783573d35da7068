"""A run: everything of ours is hung on Megatron's seams, then its own `pretrain` does the work."""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_mlmclm.attention import verify
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.datasets import datasets_provider
from megatron_mlmclm.loop.folder import record_run
from megatron_mlmclm.loop.forward import ForwardStep
from megatron_mlmclm.loop.progress import Progress
from megatron_mlmclm.loop.request import Request
from megatron_mlmclm.loop.validation import collector
from megatron_mlmclm.model import model_config
from megatron_mlmclm.phases import Phase, StepResult, wrap_train_step
from megatron_mlmclm.platform import transformer_implementation
from megatron_mlmclm.recipe import dump_recipe, megatron_flags


def run(request: Request, terminal: TextIO, is_last_rank: bool) -> None:
    """Train `request` to its end, or resume it from the newest checkpoint in its run folder."""
    recipe = request.recipe
    with _refusals():
        args = _megatron_arguments(request)
        config = model_config(
            args,
            vocab_size=request.vocabulary.size,
            padded_vocab_size=recipe.model.padded_vocab_size,
            init_std=recipe.model.init_method_std,
            pattern=request.timeline.phases[0].view.pattern,
        )
    args.mlmclm_recipe = dump_recipe(recipe)  # Megatron saves its arguments in every checkpoint
    if args.rank == 0:
        record_run(recipe)
        print(args.mlmclm_recipe, file=terminal, flush=True)
    progress = Progress(recipe, terminal) if is_last_rank else None
    forward_step = ForwardStep(request.views, recipe.validated, request.vocabulary.size)
    wrap_train_step(*_hooks(request, forward_step, progress))
    pretrain(
        pretrain_cfg_container_from_args(args, config),
        datasets_provider(request),
        ModelType.encoder_or_decoder,
        forward_step,
        non_loss_data_func=collector(forward_step, _evaluated(request, progress) if progress else None),
    )
    if progress:
        progress.end()


def _megatron_arguments(request: Request) -> argparse.Namespace:
    """The recipe's flags and then the user's, through Megatron's own parser."""
    layers = transformer_implementation()
    flags = megatron_flags(request.recipe, vocab_size=request.vocabulary.size, platform=layers)
    sys.argv = [sys.argv[0], *flags, *request.flags]
    return parse_and_validate_args()


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


def _evaluated(request: Request, progress: Progress) -> Callable[[int, dict[str, float]], None]:
    def report(consumed: int, losses: dict[str, float]) -> None:
        phase = request.timeline.at(consumed - 1)
        progress.evaluation(consumed // request.recipe.batch.global_batch_size, phase, losses)

    return report


def _hooks(request: Request, forward_step: ForwardStep, progress: Progress | None) -> tuple[Callable, Callable]:
    current: list[Phase] = []

    def on_start(step: int, first_sample: int, chunks: Sequence[torch.nn.Module]) -> None:
        phase = request.timeline.at(first_sample)
        if progress:
            progress.start(step, phase)
        if current != [phase]:  # the first step after build or load, or a switch
            current[:] = [phase]
            for chunk in chunks:
                forward_step.attend(chunk, phase.view.pattern)
            verify(chunks, phase.view.pattern)

    def on_end(result: StepResult) -> None:
        if progress:
            progress.step(result, current[0])

    return on_start, on_end
