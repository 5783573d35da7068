#!/usr/bin/env python3
"""What a training loop with all its parts adds to a bare step on the same model.

    python tools/bench/loop.py [--rounds 40] [--json results.json]

A real run of 6 layers, width 768, vocabulary 32,768, 512 tokens a step; after each of its steps the same model and
optimizer take a bare one on a batch made beforehand: forward, backward, optimizer. Ours is the time from the start of
one step to the start of the next, less the bare one between: data, Megatron's loop and schedule, our phases, progress
and metrics. A ratio is ours / bare of neighbours: 1.03 means 3 % more.
"""

import contextlib
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import step as steps_bench  # of this folder
from common import compared, make_parser, tell

SHAPE = {"hidden": 768, "layers": 6, "vocab": 32_768}
WARM = 5


def main() -> None:
    """Run it and print it; see the module's docstring."""
    parser = make_parser(__doc__, rounds=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(Path(folder), options.rounds + WARM)
    pairs = [(ours * 1e3, bare * 1e3) for ours, bare in pairs]
    tell([compared("loop: ours against a bare step", "ms/step", pairs)], options.json)


def measure(work: Path, steps: int) -> list[tuple[float, float]]:
    """(seconds of our step with all that is around it, of the bare step after it)."""
    from megatron_mlmclm import platform

    platform.prepare()
    import torch
    from megatron.training import training

    from megatron_mlmclm.loop.request import read_request
    from megatron_mlmclm.loop.run import run

    steps_bench.make_data(work, SHAPE)
    (work / "recipe.yaml").write_text(steps_bench.recipe(SHAPE, work, steps))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{work / 'store'}", rank=0, world_size=1)
    request = read_request(str(work / "recipe.yaml"), ["batch={micro_batch_size: 1, global_batch_size: 1}"], 1)
    clock = Clock(training.train_step)
    training.train_step = clock
    with contextlib.redirect_stdout(io.StringIO()):
        run(request, request.recipe.segment_after(0), io.StringIO(), is_last_rank=True)
    torch.distributed.destroy_process_group()
    return clock.pairs[WARM:]


class Clock:
    """In the place of Megatron's `train_step`: takes it, and then a bare step."""

    def __init__(self, inner: Any) -> None:
        self.pairs: list[tuple[float, float]] = []
        self._inner = inner
        self._began = self._bare = 0.0
        self._batch: tuple | None = None

    def __call__(self, forward_step: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **more: Any) -> Any:
        now = time.perf_counter()
        if self._bare:
            self.pairs.append((now - self._began - self._bare, self._bare))
        self._began = now
        result = self._inner(forward_step, data, model, optimizer, *rest, **more)
        self._batch = self._batch or fixed_batch()
        began = time.perf_counter()
        bare_step(model[0], optimizer, self._batch)
        self._bare = time.perf_counter() - began
        return result


def fixed_batch() -> tuple:
    """Inputs, positions and predicted rows of one sequence."""
    import torch

    from megatron_mlmclm.model import select_rows

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(4, SHAPE["vocab"], (1, steps_bench.LENGTH), generator=generator)
    predicted = torch.rand(1, steps_bench.LENGTH, generator=generator) < steps_bench.RATIO
    rows = select_rows(predicted, inputs, int(predicted.sum()), SHAPE["vocab"])
    return inputs, torch.arange(steps_bench.LENGTH)[None], rows


def bare_step(chunk: Any, optimizer: Any, batch: tuple) -> None:
    """Forward, backward and optimizer, without a loop around them."""
    from megatron_mlmclm.model import masked_loss

    inputs, positions, rows = batch
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = chunk(inputs, positions, None, output_processor=masked_loss, output_processor_context=rows)
    losses.sum().backward()
    checks, chunk.ddp_config.check_for_nan_in_grad = chunk.ddp_config.check_for_nan_in_grad, False
    chunk.finish_grad_sync()
    chunk.ddp_config.check_for_nan_in_grad = checks
    optimizer.step()


if __name__ == "__main__":
    main()
