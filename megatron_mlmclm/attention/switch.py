"""Setting a pattern on a live model, and proof that it took."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_mlmclm.attention.pattern import UNBOUNDED, Pattern, Window


class AttentionMismatchError(RuntimeError):
    """The live model does not attend as its phase says."""


def set_pattern(chunks: Sequence[torch.nn.Module], pattern: Pattern) -> None:
    """Set every layer of every model chunk to `pattern`. Both TE's and our core attention read it at each call.

    What belongs to sequences (documents, prefixes) comes with each batch.
    """
    kind = AttnMaskType[pattern.attn_mask_type]
    for attention in _attentions(chunks):
        attention.attn_mask_type = kind
        attention.core_attention.window_size = pattern.of_layer(attention.layer_number).window_size


def verify(chunks: Sequence[torch.nn.Module], pattern: Pattern) -> int:
    """Walk every layer, read what is really set, and ask whether it can do it; return how many layers were checked.

    Raises:
        AttentionMismatchError: names the layer, what is set there, and what the phase asks for.
    """
    layers = 0
    for attention in _attentions(chunks):
        wanted = pattern.of_layer(attention.layer_number)
        if wanted.travels:
            _verify_reads(attention, wanted)
        _verify_can(attention, wanted)
        if wanted.direction != "prefix":  # which comes with the batch alone
            live = _live(attention)
            _compare(attention, "attention", live[0], wanted.attn_mask_type)
            _compare(attention, "window", live[1], wanted.window_size)
        layers += 1
    return layers


def verify_per_sample(chunks: Sequence[torch.nn.Module], patterns: Sequence[Pattern]) -> int:
    """Walk every layer: each must read the patterns that come with a batch, and can do these. Return how many.

    Raises:
        AttentionMismatchError: names the layer and its core attention, which would attend by its own type.
    """
    layers = 0
    for attention in _attentions(chunks):
        for pattern in patterns:
            _verify_reads(attention, pattern)
            _verify_can(attention, pattern.of_layer(attention.layer_number))
        layers += 1
    return layers


def _verify_reads(attention: Attention, pattern: Pattern) -> None:
    if not getattr(attention.core_attention, "reads_patterns", False):
        what = "documents" if pattern.documents else "patterns per sequence"
        raise AttentionMismatchError(
            f"layer {attention.layer_number}: {type(attention.core_attention).__name__} attends alike to all sequences"
            f" of a batch, the phase has {what}: SdpaCoreAttention and PatternTEDotProductAttention can do that"
        )


def _verify_can(attention: Attention, pattern: Pattern) -> None:
    refusal = getattr(attention.core_attention, "refusal", None)
    reason = refusal(pattern) if refusal else None
    if reason:
        raise AttentionMismatchError(f"layer {attention.layer_number}: {reason}")


def _compare(attention: Attention, what: str, live: object, wanted: object) -> None:
    if live != wanted:
        raise AttentionMismatchError(f"layer {attention.layer_number}: {what} is {live}, the phase asks for {wanted}")


def _live(attention: Attention) -> tuple[str, Window | None]:
    """(mask type, window) that the layer's implementation goes by."""
    core = attention.core_attention
    if not isinstance(core, DotProductAttention):
        return attention.attn_mask_type.name, getattr(core, "window_size", None)
    # Megatron's local attention ignores the type of the call and our attribute: the truth sits in its softmax.
    softmax = core.scale_mask_softmax
    left, right = softmax.window_size or (UNBOUNDED, UNBOUNDED)
    return softmax.attn_mask_type.name, (left, 0 if softmax.attn_mask_type == AttnMaskType.causal else right)


def _attentions(chunks: Sequence[torch.nn.Module]) -> Iterator[Attention]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Attention))
