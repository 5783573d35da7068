"""Transformer Engine's core attention, taught to read a pattern per sequence. Importable only where TE is."""

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_mlmclm.attention.packed import hidden, pack, packed_params, te_refusal, unpack, without_padding
from megatron_mlmclm.attention.pattern import Extent, Pattern
from megatron_mlmclm.attention.per_sample import PatternParams, attend_alike


class PatternTEDotProductAttention(TEDotProductAttention):
    """As its parent, but for batches with `PatternParams`: then each pattern's sequences are one call of it.

    Whole sequences go as they are; documents and padding as `thd` with `cu_seqlens`, a prefix as a mask.
    """

    reads_patterns = True

    def refusal(self, pattern: Pattern) -> str | None:
        """Why this implementation cannot do `pattern`; None if it can."""
        return te_refusal(pattern, self.config.context_parallel_size)

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
        patterns = [pattern.of_layer(self.layer_number) for pattern in packed_seq_params.patterns]
        extents, rest = packed_seq_params.extents, rest | {"attention_bias": attention_bias}

        def attend(q: Tensor, k: Tensor, v: Tensor, places: list[int]) -> Tensor:
            return self._attend(q, k, v, patterns[places[0]], [extents[place] for place in places], rest)

        # A mask is that of one sequence; cu_seqlens hold those of many.
        kinds = [(p, e) if p.direction == "prefix" else p for p, e in zip(patterns, extents, strict=True)]
        return attend_alike(attend, query, key, value, kinds)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, extents: list[Extent], rest: dict[str, Any]
    ) -> Tensor:
        """Sequences [s, b, heads, d] that share `pattern` -> [s, b, heads * d]."""
        inputs, batch, kind = (query, key, value), query.shape[1], AttnMaskType[pattern.attn_mask_type]
        mask = params = None
        if pattern.direction == "prefix":
            mask = hidden(pattern, extents[0], len(query), query.device)
        elif self.config.context_parallel_size == 1:  # else sequences are whole: see `refusal`
            params = packed_params(pattern, extents, len(query), query.device)
        live, self.window_size = self.window_size, pattern.window_size
        try:
            if params is None:
                out = super().forward(*inputs, mask, kind, packed_seq_params=None, **rest)
            else:
                packed = (pack(tensor) for tensor in inputs)
                out = unpack(super().forward(*packed, None, kind, packed_seq_params=params, **rest), batch)
        finally:
            self.window_size = live  # as set for batches that bring no pattern
        return without_padding(out, extents) if self.config.context_parallel_size == 1 else out
