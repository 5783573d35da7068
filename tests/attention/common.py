"""A core attention on its own, and what goes into it."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mlmclm.attention import SdpaCoreAttention

HEADS, GROUPS, WIDTH = 4, 2, 8


def core(kind: str = "causal", layer_number: int = 1, dropout: float = 0.0) -> SdpaCoreAttention:
    config = TransformerConfig(
        num_layers=6,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=dropout,
    )
    return SdpaCoreAttention(config, layer_number, AttnMaskType[kind], "self", pg_collection=ProcessGroupCollection())


def inputs(length: int, batch: int, seed: int = 1) -> list[torch.Tensor]:
    """Query [s, b, heads, d], key and value [s, b, groups, d], leaves of autograd."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, batch, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
