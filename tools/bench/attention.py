#!/usr/bin/env python3
"""Time and peak memory of our core attention, forward and backward, against a dense [s, s] mask.

    python tools/bench/attention.py [--lengths 512 8192] [--rounds 3] [--heads 8] [--json results.json]

The peer is one `scaled_dot_product_attention` under a boolean mask of the whole sequence, as implementations that know
no documents or windows do it. Rounds of ours and the peer's alternate in one process; a ratio is ours / peer of a
round, its median, least and largest are told. Below 1 is better. The last case has another peer: eight calls of ours.

JSON: a list of {case, ours, peer, unit, ratio, ratio_min, ratio_max}.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
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
Step = Callable[[], None]


def main() -> None:
    """Run the cases and print them; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heads", type=int, default=8, help="query heads; half as many of keys and values")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    bench = Bench(options.heads, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    cases = {f"{name}, {n}": bench.against_mask(p, n) for n in options.lengths for name, p in PATTERNS.items()}
    cases[f"8 documents of {DOCUMENT} against 8 calls"] = bench.against_calls(8)
    print(f"{'case':44}{'ours':>12}{'peer':>12}  {'ratio':>6} {'least':>6} {'most':>6}")
    results = []
    for case, make in cases.items():
        for result in measured(case, *make(), options.rounds):
            results.append(result)
            print("{case:44}{ours:12.1f}{peer:12.1f}  {ratio:6.2f} {ratio_min:6.2f} {ratio_max:6.2f}".format(**result))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


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


def measured(case: str, ours: Step, peer: Step, rounds: int) -> Iterator[dict]:
    """Milliseconds and megabytes of one case."""
    for step in (ours, peer):  # the first of all makes masks, the kernels' threads and gradients
        step()
    times = [(seconds(ours) * 1e3, seconds(peer) * 1e3) for _ in range(rounds)]
    yield compared(case, "ms", times)
    with no_memory_kept():
        yield compared(case, "MB", [(peak(ours) / 1e6, peak(peer) / 1e6) for _ in range(rounds)])


def compared(case: str, unit: str, pairs: list[tuple[float, float]]) -> dict:
    """One line of the results."""
    ratios = [ours / peer if peer else float("nan") for ours, peer in pairs]
    ours, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
    spread = {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return {"case": f"{case} ({unit})", "ours": ours, "peer": peer, "unit": unit, **spread}


def seconds(step: Step) -> float:
    """How long one step takes; on a CPU the time of all threads, which other work on the machine changes little."""
    if not torch.cuda.is_available():
        began = time.process_time()
        step()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def peak(step: Step) -> int:
    """Bytes that one step needs at once beside what was there."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


@contextlib.contextmanager
def no_memory_kept() -> Iterator[None]:
    """Freed tensors go back to the system at once (glibc), so that the peak of the process is that of a step."""
    threshold, default = -3, 128 * 1024  # M_MMAP_THRESHOLD
    libc = ctypes.CDLL(None)
    libc.mallopt(threshold, 16 * 1024)
    libc.malloc_trim(0)
    yield
    libc.mallopt(threshold, default)


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
