#!/usr/bin/env python3
"""Peak memory and time of the loss, forward and backward: by chunks of rows, against whole logits.

    python tools/bench/loss_memory.py [--rounds 5] [--positions 2048] [--json FILE]

2,048 positions of width 256, 30 % of them predicted, a vocabulary of 128,256. One peer has the logits of the predicted
positions whole; one, as Megatron's own loss, those of all positions; one is what transformers' EuroBERT does: its
linear layer and cross entropy, at all positions. Ours and the first two are Megatron's layer under its data parallel
wrapper, which has a place for the weight's gradient; to autograd a gradient is memory of its own, as it is in training.
Rounds alternate in one process. A ratio is ours / peer: below 1 is better.
"""

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator

import torch
from common import make_parser, measured, tell  # of this folder
from torch import Tensor

WIDTH, VOCABULARY, RATIO = 256, 128_256, 0.30
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Run both precisions and print them; see the module's docstring."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--positions", type=int, default=2048)
    options = parser.parse_args()
    from megatron_mlmclm import platform

    logging.getLogger("megatron").setLevel(logging.WARNING)
    with platform.quiet_imports(), tempfile.TemporaryDirectory() as folder:
        platform.prepare()
        from megatron.core import parallel_state

        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tell((row for name in PRECISIONS for row in compare(name, options.positions, options.rounds)), options.json)
        torch.distributed.destroy_process_group()


def compare(name: str, positions: int, rounds: int) -> Iterator[dict]:
    """The results of one precision."""
    ours = step("chunked", positions, PRECISIONS[name])
    peers = {
        "whole logits of predicted positions": step("whole", positions, PRECISIONS[name]),
        "Megatron's, of all positions": step("dense", positions, PRECISIONS[name]),
        "EuroBERT's, of all positions": eurobert_step(positions, PRECISIONS[name]),
    }
    for what, peer in peers.items():
        yield from measured(f"loss: {name}, {what}", ours, peer, rounds)


def inputs(positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [positions, 1, WIDTH], labels and which are predicted [1, positions]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(positions, 1, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (1, positions), generator=generator)
    return hidden, labels, torch.rand(1, positions, generator=generator) < RATIO


def step(head: str, positions: int, dtype: torch.dtype) -> Callable[[], None]:
    """One forward and backward of the loss with a head of the model's form."""
    from megatron_mlmclm.model import masked_loss, select_rows

    hidden, labels, predicted = inputs(positions, dtype)
    layer = parallel_layer(dtype).module
    rows = select_rows(predicted, labels, int(predicted.sum()), VOCABULARY)

    def run() -> None:
        hidden.grad = None
        masked_loss(hidden, layer, None, rows, head).sum().backward()

    return run


def eurobert_step(positions: int, dtype: torch.dtype) -> Callable[[], None]:
    """The same of transformers' model: its head, and the loss function that it is given."""
    from transformers.loss.loss_utils import ForMaskedLMLoss

    hidden, labels, predicted = inputs(positions, dtype)
    layer = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    labels = labels.masked_fill(~predicted, -100)

    def run() -> None:
        hidden.grad = layer.weight.grad = None
        ForMaskedLMLoss(layer(hidden.transpose(0, 1)), labels, VOCABULARY).backward()

    return run


@functools.cache
def parallel_layer(dtype: torch.dtype) -> torch.nn.Module:
    """Megatron's own output layer of one rank, wrapped; its main gradient is float32."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=dtype,
        gradient_accumulation_fusion=True,
    )
    layer = ColumnParallelLinear(
        WIDTH,
        VOCABULARY,
        config=config,
        init_method=functools.partial(torch.nn.init.normal_, std=0.02),
        bias=False,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, options, layer)


if __name__ == "__main__":
    main()
