"""What attention costs: memory linear in the sequence, and documents no dearer than sequences of their own."""

import statistics
import time

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


def test_eight_documents_cost_what_eight_sequences_do():
    """CPU time, which other work on the machine changes little; tools/bench/attention.py measures more."""
    documents, length = 8, 512
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = Extent(documents * length, tuple(range(0, documents * length + 1, length)))
    packed = pattern_params([Pattern("bidirectional", documents=True)], whole.length, [whole])
    alone = pattern_params([Pattern("bidirectional")], length)
    joint, separate = inputs(whole.length, 1), [inputs(length, 1) for _ in range(documents)]

    def seconds(step) -> float:
        began = time.process_time()
        step()
        return time.process_time() - began

    def together() -> None:
        core()(*joint, None, packed_seq_params=packed).sum().backward()

    def apart() -> None:
        for each in separate:
            core()(*each, None, packed_seq_params=alone).sum().backward()

    together(), apart()
    ratios = [seconds(together) / seconds(apart) for _ in range(5)]
    torch.set_num_threads(threads)
    assert statistics.median(ratios) < 1.3
