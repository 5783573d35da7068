#!/usr/bin/env python3
"""Time and peak memory of our core attention, forward and backward, against a dense [s, s] mask.

    python tools/bench/attention.py [--lengths 512 8192] [--rounds 3] [--heads 8] [--json results.json]

The peer is one `scaled_dot_product_attention` under a boolean mask of the whole sequence, as implementations that know
no documents or windows do it. Rounds of ours and the peer's alternate in one process; a ratio is ours / peer of a
round. The last case has another peer: eight calls of ours.
"""

from collections.abc import Callable, Iterator

import torch
from common import Step, make_parser, measured, tell
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_mlmclm.attention import Extent, Pattern, SdpaCoreAttention, pattern_params

WIDTH = 64  # of a head
DOCUMENT = 512
WINDOW = (64, 64)  # ModernBERT's
PATTERNS = {
    "causal": Pattern("causal"),
    "bidirectional": Pattern("bidirectional"),
    "prefix": Pattern("prefix"),
    "causal documents": Pattern("causal", documents=True),
    "bidirectional documents": Pattern("bidirectional", documents=True),
    "causal window": Pattern("causal", window=WINDOW),
    "bidirectional window": Pattern("bidirectional", window=WINDOW),
}


def main() -> None:
    """Run the cases and print them; see the module's docstring."""
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=8, help="query heads; half as many of keys and values")
    options = parser.parse_args()
    tell(results(options.lengths, options.heads, options.rounds), options.json)


def results(lengths: list[int], heads: int, rounds: int) -> Iterator[dict]:
    """Every pattern at every length, then many documents in one sequence."""
    bench = Bench(heads, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    cases = {f"{name}, {n}": bench.against_mask(p, n) for n in lengths for name, p in PATTERNS.items()}
    cases[f"8 documents of {DOCUMENT} against 8 calls"] = bench.against_calls(8)
    for case, make in cases.items():
        yield from measured(f"attention: {case}", *make(), rounds)


class Bench:
    """A core attention of GQA, and what is measured with it."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.heads, self.device = heads, device
        config = TransformerConfig(
            num_layers=1,
            hidden_size=heads * WIDTH,
            num_attention_heads=heads,
            num_query_groups=max(1, heads // 2),
            attention_dropout=0.0,
        )
        groups = ProcessGroupCollection()
        self.core = SdpaCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)

    def inputs(self, length: int) -> list[Tensor]:
        """Query [s, 1, heads, d], key and value [s, 1, heads / 2, d], and the gradient of the output."""
        shapes = [(length, 1, n, WIDTH) for n in (self.heads, *[max(1, self.heads // 2)] * 2)]
        leaves = [torch.randn(shape, device=self.device, requires_grad=True) for shape in shapes]
        return [*leaves, torch.randn(length, 1, self.heads * WIDTH, device=self.device)]

    def ours(self, pattern: Pattern, extent: Extent) -> Step:
        """One forward and backward of our attention."""
        *inputs, gradient = self.inputs(extent.length)
        params = pattern_params([pattern], extent.length, [extent])
        return lambda: self.core(*inputs, None, packed_seq_params=params).backward(gradient)

    def against_mask(self, pattern: Pattern, length: int) -> Callable[[], tuple[Step, Step]]:
        """(ours, one call under a mask of the whole sequence)."""
        edges = tuple(range(0, length + 1, min(DOCUMENT, length)))
        extent = Extent(length, edges, prefix=length // 4)

        def make() -> tuple[Step, Step]:
            query, key, value, gradient = self.inputs(length)

            def dense() -> None:
                q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
                seen = mask(pattern, extent, self.device)
                out = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
                out.permute(2, 0, 1, 3).flatten(2).backward(gradient)

            return self.ours(pattern, extent), dense

        return make

    def against_calls(self, documents: int) -> Callable[[], tuple[Step, Step]]:
        """(documents in one sequence, a call for each)."""
        edges = tuple(range(0, documents * DOCUMENT + 1, DOCUMENT))

        def make() -> tuple[Step, Step]:
            each = [self.ours(Pattern("bidirectional"), Extent(DOCUMENT)) for _ in range(documents)]
            packed = self.ours(Pattern("bidirectional", documents=True), Extent(edges[-1], edges))
            return packed, lambda: [step() for step in each]

        return make


def mask(pattern: Pattern, extent: Extent, device: torch.device) -> Tensor:
    """Who sees whom, bool [s, s]."""
    position = torch.arange(extent.length, device=device)
    distance = position[:, None] - position[None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if pattern.direction != "bidirectional":
        seen = distance >= 0
    if pattern.direction == "prefix":
        seen = seen | (position[None] < extent.prefix)
    if pattern.documents:
        document = torch.bucketize(position, torch.tensor(extent.cu_seqlens[1:], device=device), right=True)
        seen = seen & (document[:, None] == document[None])
    if pattern.window:
        seen = seen & (distance <= pattern.window[0]) & (distance >= -pattern.window[1])
    return seen


if __name__ == "__main__":
    main()
