"""Core attention on `torch.nn.functional.scaled_dot_product_attention`, for CPUs and for GPUs without TE."""

import contextlib
from functools import lru_cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_mlmclm.attention.context import context_group, gather_sequence, held_stretches
from megatron_mlmclm.attention.pattern import UNBOUNDED, Extent, Pattern, Window
from megatron_mlmclm.attention.per_sample import PatternParams, attend_alike, joined
from megatron_mlmclm.attention.tiles import TILE, Stretch, Tile, tiles_of

DIRECTIONS = {AttnMaskType.causal: "causal", AttnMaskType.no_mask: "bidirectional"}
ALIGNMENT = 16  # elements; CUDA's memory-efficient kernel reads a mask in vectors


class SdpaCoreAttention(MegatronModule):
    """Attends by blocks: never over what a pattern hides whole, and without a [s, s] mask.

    Takes its mask type from each call, as TE's does, so that a live model can be switched; Megatron's local
    `DotProductAttention` is causal by construction and ignores the type of the call. `window_size` (left, right) is
    set with the type (`attention.set_pattern`). Under context parallelism keys and values are gathered.
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
        if attention_type != "self":
            raise ValueError(f"SdpaCoreAttention does self attention, not {attention_type}")
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.window_size: Window = (UNBOUNDED, 0 if attn_mask_type == AttnMaskType.causal else UNBOUNDED)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = context_group(config, pg_collection)

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

        s is this rank's share of the sequence. By `attn_mask_type` (causal or no_mask) and `window_size`, or sequence
        by sequence where `packed_seq_params` is `PatternParams`. Padding gives zeros.
        """
        batch = query.shape[1]
        if isinstance(packed_seq_params, PatternParams):
            patterns, extents = packed_seq_params.patterns, packed_seq_params.extents
        elif attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("SdpaCoreAttention takes its pattern from attn_mask_type or PatternParams alone")
        else:
            patterns = (self._uniform(self.attn_mask_type if attn_mask_type is None else attn_mask_type),) * batch
            extents = ()
        held = ((0, len(query)),)
        if self.cp_group is not None:
            held = held_stretches(len(query) * self.cp_group.size(), self.cp_group)
            key, value = gather_sequence(key, value, self.cp_group)
        extents = extents or (Extent(len(key)),) * batch

        def attend(q: Tensor, k: Tensor, v: Tensor, places: list[int]) -> Tensor:
            pattern, extent = patterns[places[0]].of_layer(self.layer_number), extents[places[0]]
            return self._attend(q, k, v, pattern, extent, held)

        return attend_alike(attend, query, key, value, list(zip(patterns, extents, strict=True)))

    def _uniform(self, kind: AttnMaskType) -> Pattern:
        """The pattern that is set on this layer."""
        if kind not in DIRECTIONS:
            raise ValueError(f"SdpaCoreAttention cannot do attn_mask_type {kind.name}")
        return Pattern(DIRECTIONS[kind], window=self.window_size)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, extent: Extent, held: tuple[Stretch, ...]
    ) -> Tensor:
        """Sequences [s, b, heads, d] that share `pattern` and `extent` -> [s, b, heads * d]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        tiles = tiles_of(pattern, extent, key.shape[0], held)
        bounds = pattern.window_size if pattern.direction != "prefix" else (UNBOUNDED, 0)
        with self._random_state():
            out = attend_tiles(q, k, v, tiles, bounds, self.dropout if self.training else 0.0, self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _random_state(self) -> contextlib.AbstractContextManager:
        """Where dropout draws: as in Megatron's own attention, heads on other tensor parallel ranks draw apart."""
        tracker = get_cuda_rng_tracker()
        if self.dropout and not self.config.sequence_parallel and tracker.is_initialized():
            return tracker.fork()
        return contextlib.nullcontext()

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict:
        """Nothing to save."""
        return {}


def attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: tuple[Tile, ...],
    bounds: Window,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend tile by tile, those of one shape in one call.

    `query` [b, heads, n, d] holds the queries of `tiles` one after the other, `key` and `value` [b, groups, s, d] all
    positions; -> [b, heads, n, d]. `bounds` (left, right) are those of "band" tiles.
    """
    if all(tile.rule == "none" for tile in tiles):
        # Still connected: under context parallelism backward sums keys' gradients over the ranks, and all must come.
        return query * 0.0 + (key[:, :, :1] + value[:, :, :1]).sum() * 0.0
    queries = query.split([tile.shape[0] for tile in tiles], dim=2)
    keys, values = (stretches(t, tuple(tile.keys for tile in tiles)) for t in (key, value))
    places_of: dict[tuple, list[int]] = {}
    for place, tile in enumerate(tiles):
        # On a CPU a call costs less than copying tiles together (32 documents of 128: 116 ms against 155).
        alone = place if query.device.type == "cpu" else None
        places_of.setdefault((*tile.shape, alone), []).append(place)
    outputs = list(queries)
    for (n_queries, n_keys, offset, rule, _), places in places_of.items():
        if rule == "none":
            for place in places:
                outputs[place] = torch.zeros_like(queries[place])
            continue
        q, k, v = (joined([each[place] for place in places], dim=0) for each in (queries, keys, values))
        mask = band(n_queries, n_keys, offset, bounds, q.dtype, q.device) if rule == "band" else None
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=rule == "causal",
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for place, part in zip(places, out.chunk(len(places)), strict=True):
            outputs[place] = part
    return joined(outputs, dim=2)


def stretches(tensor: Tensor, bounds: tuple[Stretch, ...]) -> tuple[Tensor, ...]:
    """Stretches of `tensor` [b, heads, s, d] along s; they may overlap."""
    if len(bounds) == 1 or sum(end - start for start, end in bounds) > 4 * tensor.shape[2]:
        # Each may be most of the sequence: all their gradients at once would not be linear in s.
        return tuple(tensor[:, :, start:end] for start, end in bounds)
    return _Stretches.apply(tensor, bounds)


class _Stretches(torch.autograd.Function):
    """Slices whose gradients are added up in one buffer; autograd's own fill a whole one for each slice."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bounds: tuple[Stretch, ...]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.bounds = tensor.shape, bounds
        ctx.set_materialize_grads(False)
        return tuple(tensor[:, :, start:end] for start, end in bounds)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        known = [pair for pair in zip(ctx.bounds, gradients, strict=True) if pair[1] is not None]
        if not known:
            return None, None
        total = known[0][1].new_zeros(ctx.shape)
        for (start, end), gradient in known:
            total[:, :, start:end] += gradient
        return total, None


def band(n_queries: int, n_keys: int, offset: int, bounds: Window, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the scores of a tile whose first query is `offset` positions after its first key.

    0 where the key is at most `bounds` (left, right) away, else minus infinity; [n_queries, n_keys]. Tiles share one
    buffer, of which each takes the columns it needs: whatever their number, it is all that is kept for backward.
    """
    left, right = bounds
    before = left if left != UNBOUNDED else _power_of_two(offset)
    after = TILE + right if right != UNBOUNDED else _power_of_two(n_keys - offset)
    before, after = (-(-width // ALIGNMENT) * ALIGNMENT for width in (before, after + ALIGNMENT))
    before += offset % ALIGNMENT
    first = before - offset
    return _band_buffer(before, after, bounds, dtype, device)[:n_queries, first : first + n_keys]


@lru_cache(maxsize=32)
def _band_buffer(before: int, after: int, bounds: Window, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `band`, of a tile with keys from `before` positions before its first query to `after` after it."""
    with torch.inference_mode(False):  # it outlives the call, and another may train
        query = torch.arange(TILE, device=device)[:, None]
        distance = query - torch.arange(-before, after, device=device)
        left, right = (width if width != UNBOUNDED else before + after + TILE for width in bounds)
        hidden = (distance > left) | (distance < -right)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
