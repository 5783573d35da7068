"""Scaled rotary frequencies. Megatron's own llama3 scaling takes one factor and fixes the other three."""

import math
from typing import Protocol

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class RopeScaling(Protocol):
    """What the recipe's `model.rope_scaling` offers."""

    rope_type: str
    factor: float
    low_freq_factor: float | None
    high_freq_factor: float | None
    original_max_position_embeddings: int | None


def scale_rope(chunks: list[MegatronModule], scaling: RopeScaling) -> list[MegatronModule]:
    """Scale the frequencies of every chunk, in place, before they are first used. A `pre_wrap_hook`."""
    for chunk in chunks:
        rope = chunk.rotary_pos_emb
        rope.inv_freq = scaled(rope.inv_freq, scaling)
    return chunks


def scaled(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """fp32 [head_dim / 2] -> the same.

    linear: all divided by `factor`. llama3: long waves are divided, short ones kept, those between mixed by how many
    of them fit the original context. Sources: Chen et al., arXiv 2306.15595; Llama 3.1's model code.
    """
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = scaling.original_max_position_embeddings / (2 * math.pi / inv_freq)  # in the original context
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(inv_freq / scaling.factor, inv_freq, kept)
