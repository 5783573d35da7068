"""Setting a pattern on a live model, and proof that it took."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_mlmclm.attention.pattern import Pattern


class AttentionMismatchError(RuntimeError):
    """The live model does not attend as its phase says."""


def set_pattern(chunks: Sequence[torch.nn.Module], pattern: Pattern) -> None:
    """Set every layer of every model chunk to `pattern`. Both TE's and our core attention read it at each call."""
    kind = AttnMaskType[pattern.attn_mask_type]
    for attention in _attentions(chunks):
        attention.attn_mask_type = kind


def verify(chunks: Sequence[torch.nn.Module], pattern: Pattern) -> int:
    """Walk every layer and read what is really set; return how many layers were checked.

    Raises:
        AttentionMismatchError: names the layer, what is set there, and what the phase asks for.
    """
    layers = 0
    for attention in _attentions(chunks):
        live = _live_mask_type(attention)
        if live != pattern.attn_mask_type:
            raise AttentionMismatchError(
                f"layer {attention.layer_number}: attention is {live}, the phase asks for {pattern.attn_mask_type}"
            )
        layers += 1
    return layers


def verify_per_sample(chunks: Sequence[torch.nn.Module]) -> int:
    """Walk every layer: each must read the patterns that come with a batch. Return how many were checked.

    Raises:
        AttentionMismatchError: names the layer and its core attention, which would attend by its own type.
    """
    layers = 0
    for attention in _attentions(chunks):
        core = attention.core_attention
        if not getattr(core, "reads_patterns", False):
            raise AttentionMismatchError(
                f"layer {attention.layer_number}: {type(core).__name__} attends alike to all sequences of a batch, the"
                " phase mixes patterns"
            )
        layers += 1
    return layers


def _live_mask_type(attention: Attention) -> str:
    core = attention.core_attention
    if isinstance(core, DotProductAttention):
        # Megatron's local attention ignores the type of the call: the truth sits in its softmax.
        return core.scale_mask_softmax.attn_mask_type.name
    return attention.attn_mask_type.name


def _attentions(chunks: Sequence[torch.nn.Module]) -> Iterator[Attention]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Attention))
