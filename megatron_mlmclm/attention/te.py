"""Transformer Engine's core attention, taught to read a pattern per sequence. Importable only where TE is."""

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_mlmclm.attention.pattern import Pattern
from megatron_mlmclm.attention.per_sample import PatternParams, attend_by_pattern, prefix_visible


class PatternTEDotProductAttention(TEDotProductAttention):
    """As its parent, but for batches with `PatternParams`: then each pattern's sequences are one call of it."""

    reads_patterns = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **rest: Any,
    ) -> Tensor:
        """See the parent."""
        if not isinstance(packed_seq_params, PatternParams):
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params, **rest
            )
        parent = super().forward

        def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
            mask = None
            if pattern.direction == "prefix":  # TE's True hides
                mask = ~prefix_visible(pattern.prefix, q.shape[0], q.device)[None, None]
            return parent(q, k, v, mask, AttnMaskType[pattern.attn_mask_type], attention_bias, None, **rest)

        return attend_by_pattern(attend, query, key, value, packed_seq_params.patterns)
