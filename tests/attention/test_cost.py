"""What attention costs in memory. Time is `tools/bench/attention.py`'s."""

import pytest
import torch

from megatron_mlmclm.attention import Extent, Pattern, pattern_params
from tests.attention.common import core, inputs

PATTERNS = {
    "causal": Pattern("causal"),
    "prefix": Pattern("prefix"),
    "documents": Pattern("bidirectional", documents=True),
    "window": Pattern("bidirectional", window=(64, 64)),
    "open window": Pattern("bidirectional", window=(-1, 64)),
}


def kept(pattern: Pattern, length: int) -> int:
    """Bytes that are kept for backward, each storage once."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    extent = Extent(length, tuple(range(0, length + 1, 256)), prefix=length // 3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        core()(*inputs(length, 1), None, packed_seq_params=pattern_params([pattern], length, [extent]))
    return sum(storages.values())


@pytest.mark.parametrize("name", PATTERNS)
def test_memory_is_linear_in_the_sequence(name):
    small, large = kept(PATTERNS[name], 1024), kept(PATTERNS[name], 4096)
    assert large < 4.2 * small
    assert large < 4096 * 4096  # not one byte for each pair
