"""Context parallelism: each rank has two chunks of every sequence, in Megatron's zigzag layout.

Of 2 * cp equal chunks rank r has chunks r and 2 * cp - 1 - r (`megatron.core.utils`, per-sequence balancing), which
evens out the work of causal attention. Rotary embeddings are cut likewise by Megatron itself.
"""

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mlmclm.attention.tiles import Stretch


def context_group(config: TransformerConfig, groups: ProcessGroupCollection | None) -> ProcessGroup | None:
    """The ranks that share a sequence; None where each has whole ones."""
    if config.context_parallel_size == 1:
        return None
    return groups.cp if groups is not None else parallel_state.get_context_parallel_group()


def held_stretches(seq_length: int, group: ProcessGroup) -> tuple[Stretch, Stretch]:
    """Positions [start, end) of a sequence that this rank of `group` has, in its order."""
    chunk = seq_length // (2 * group.size())
    return tuple((number * chunk, (number + 1) * chunk) for number in _chunks(group.rank(), group.size()))


def cut_sequence(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's share of `tensor`, whose dimension `dim` is a whole sequence."""
    chunks = tensor.chunk(2 * group.size(), dim=dim)
    return torch.cat([chunks[number] for number in _chunks(group.rank(), group.size())], dim=dim)


def gather_sequence(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values [s / cp, b, groups, d] of all ranks, each [s, b, groups, d] in the sequence's own order.

    One collective forward, and one in backward, which sums the gradients and gives each rank its share.
    """
    both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=group)
    held = [number for rank in range(group.size()) for number in _chunks(rank, group.size())]
    chunks = both.chunk(2 * group.size())
    whole = torch.cat([chunks[held.index(number)] for number in range(2 * group.size())])
    return whole.split(key.shape[-1], dim=-1)


def _chunks(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank
