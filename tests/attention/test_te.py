"""What each pattern hands to Transformer Engine's attention.

TE does not run without a GPU, but its layers can be built: its `DotProductAttention.forward` is replaced by plain
attention over what its documentation says of the call. Skipped where TE is absent, as it is from this package's own
environment.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch

from megatron_mlmclm.platform.doctor import has_file
from tests.attention import dense

if not has_file("transformer_engine", "pytorch"):
    pytest.skip("Transformer Engine is absent: what it is handed is not checked", allow_module_level=True)

from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention.utils import check_set_window_size

from megatron_mlmclm.attention import Extent, Pattern, pattern_params, set_pattern, verify
from megatron_mlmclm.model.build import layer_spec
from tests.attention.common import GROUPS, HEADS, WIDTH, inputs

LENGTH = 24
PATTERNS = {name: pattern for name, pattern in dense.PATTERNS.items() if name != "open window"}
WHOLE = (Extent(LENGTH), Extent(LENGTH))
PARTS = (dense.extent(20, (3, 11), prefix=9), dense.extent(LENGTH, (5, 17), prefix=4))
CU_SEQLENS = {  # of the two sequences end to end; padding, 20 to 24, is a document of its own
    "documents": [0, 3, 11, 20, 24, 29, 41, 48],
    "padding": [0, 20, 24, 48],
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Layers of TE's spec, with the queries of a device answered that they ask when they are built."""
    store = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    answers = {
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (9, 0),
        "current_device": lambda: torch.device("cpu"),
    }

    def build(pattern: Pattern, layers: int = 1) -> torch.nn.Module:
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=HEADS * WIDTH,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            normalization="RMSNorm",
            add_bias_linear=False,
            use_cpu_initialization=True,
            transformer_impl="transformer_engine",
            window_size=pattern.window,
        )
        with pytest.MonkeyPatch.context() as patch:
            for name, answer in answers.items():
                patch.setattr(torch.cuda, name, answer)
            spec = layer_spec(SimpleNamespace(transformer=config), pattern=pattern)
            return torch.nn.ModuleList(build_module(spec, config=config, layer_number=n + 1) for n in range(layers))

    yield build
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """Every call of TE's attention, which answers as its documentation says."""
    made: list[dict] = []

    def forward(self, query, key, value, attention_mask=None, qkv_format="sbhd", **call):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # TE says so when it corrects a window
            window = check_set_window_size(call["attn_mask_type"], self.window_size)
        made.append(call | {"qkv_format": qkv_format, "window_size": window, "attention_mask": attention_mask})
        if qkv_format == "thd":
            return torch.cat([_attend(query, key, value, *d, made[-1]) for d in _documents(call["cu_seqlens_q"])])
        sequences = zip(*(tensor.unbind(1) for tensor in (query, key, value)), strict=True)
        return torch.stack([_attend(*each, 0, len(query), made[-1]) for each in sequences], dim=1)

    monkeypatch.setattr(DotProductAttention, "forward", forward)
    return made


def _documents(cu_seqlens):
    assert cu_seqlens.dtype == torch.int32
    return zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)


def _attend(query, key, value, start, end, call):
    """[tokens, heads, d] -> [end - start, heads * d]; rows and columns count from `start`."""
    if call["attention_mask"] is not None:
        seen = ~call["attention_mask"][0, 0]
    else:
        direction = "causal" if "causal" in call["attn_mask_type"] else "bidirectional"
        seen = dense.visible(Pattern(direction, window=call["window_size"]), Extent(end - start), end - start)
    return dense.attend(*(tensor[start:end].transpose(0, 1) for tensor in (query, key, value)), seen)


def expected_call(name: str, padded: bool) -> tuple[str, str, list[int] | None]:
    """(qkv_format, mask type, cu_seqlens)."""
    pattern = PATTERNS[name]
    if pattern.direction == "prefix":
        return "sbhd", "arbitrary", None
    kind = "causal" if pattern.direction == "causal" else "no_mask"
    if not pattern.documents and not padded:
        return "sbhd", kind, None
    cu_seqlens = CU_SEQLENS["documents" if pattern.documents else "padding"]
    return "thd", {"causal": "padding_causal", "no_mask": "padding"}[kind], cu_seqlens


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", PATTERNS)
def test_what_a_batch_brings(build, calls, name, padded):
    pattern = PATTERNS[name]
    extents = PARTS if padded or pattern.travels else WHOLE
    (layer,) = build(Pattern("causal"))  # which is not what the batch says
    ours = inputs(LENGTH, 2)
    out = layer.self_attention.core_attention(
        *ours, None, layer.self_attention.attn_mask_type, None, pattern_params([pattern] * 2, LENGTH, extents)
    )
    for place, extent in enumerate(extents):
        q, k, v = (tensor[:, place].transpose(0, 1) for tensor in ours)
        expected = dense.attend(q, k, v, dense.visible(pattern, extent, LENGTH))
        assert (out[:, place] - expected).abs().max() < 1e-5
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in ours)
    assert not ours[2].grad[extents[0].length :, 0].any()
    assert len(calls) == (2 if pattern.direction == "prefix" else 1)
    qkv_format, kind, cu_seqlens = expected_call(name, extents is PARTS)
    for call in calls:
        assert (call["qkv_format"], call["attn_mask_type"]) == (qkv_format, kind)
        assert call["window_size"] == pattern.window_size
        assert (call["attention_mask"] is None) == (kind != "arbitrary")
        if cu_seqlens:
            assert call["cu_seqlens_q"].tolist() == call["cu_seqlens_kv"].tolist() == cu_seqlens
            longest = max(b - a for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False))
            assert call["max_seqlen_q"] == call["max_seqlen_kv"] == longest
    assert layer.self_attention.core_attention.window_size == (-1, 0)  # as it was


UNIFORM = {
    "causal": (Pattern("causal"), "causal", [(-1, 0)] * 4),
    "bidirectional": (Pattern("bidirectional"), "no_mask", [(-1, -1)] * 4),
    "window": (Pattern("bidirectional", window=(5, 3)), "no_mask", [(5, 3)] * 4),
    "causal window": (Pattern("causal", window=(5, 3)), "causal", [(5, 0)] * 4),
    "every third": (
        Pattern("bidirectional", window=(5, 3), global_every=3),
        "no_mask",
        [(-1, -1), (5, 3), (5, 3), (-1, -1)],
    ),
}


def test_a_live_switch(build, calls):
    """From each pattern to each: mask type and window of every layer are what TE goes by."""
    layers = build(Pattern("causal"), layers=4)
    query, key, value = (tensor.detach() for tensor in inputs(LENGTH, 2))
    for pattern, kind, windows in [*UNIFORM.values(), *reversed(UNIFORM.values())]:
        set_pattern([layers], pattern)
        assert verify([layers], pattern) == 4
        calls.clear()
        for layer in layers:
            attention = layer.self_attention
            attention.core_attention(query, key, value, None, attention.attn_mask_type)
        assert [(call["attn_mask_type"], call["window_size"]) for call in calls] == [(kind, w) for w in windows]


@pytest.mark.parametrize("name", [name for name in UNIFORM if name != "every third"])
def test_a_layer_is_built_with_its_pattern(build, name):
    pattern = UNIFORM[name][0]
    layers = build(pattern)
    set_pattern([layers], pattern)
    assert verify([layers], pattern) == 1
