"""Core attention on `torch.nn.functional.scaled_dot_product_attention`, for CPUs and for GPUs without TE."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_mlmclm.attention.pattern import Pattern
from megatron_mlmclm.attention.per_sample import PatternParams, attend_by_pattern, prefix_visible

DIRECTIONS = {AttnMaskType.causal: Pattern("causal"), AttnMaskType.no_mask: Pattern("bidirectional")}


class SdpaCoreAttention(MegatronModule):
    """Takes its mask type from each call, as TE's does, so that a live model can be switched.

    Megatron's local `DotProductAttention` is causal by construction and ignores the type of the call.
    """

    reads_patterns = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1 or attention_type != "self":
            raise ValueError("SdpaCoreAttention does self attention without context parallelism")
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].

        By `attn_mask_type` (causal or no_mask), or sequence by sequence where `packed_seq_params` is `PatternParams`.
        """
        if isinstance(packed_seq_params, PatternParams):
            return attend_by_pattern(self._attend, query, key, value, packed_seq_params.patterns)
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("SdpaCoreAttention takes its pattern from attn_mask_type or PatternParams alone")
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if kind not in DIRECTIONS:
            raise ValueError(f"SdpaCoreAttention cannot do attn_mask_type {kind.name}")
        return self._attend(query, key, value, DIRECTIONS[kind])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        visible = None
        if pattern.direction == "prefix":
            visible = prefix_visible(pattern.prefix, query.shape[0], query.device)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=pattern.direction == "causal",
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict:
        """Nothing to save."""
        return {}
