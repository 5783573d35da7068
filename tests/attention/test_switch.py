"""Setting and verifying a pattern on layers of each implementation."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mlmclm.attention import AttentionMismatchError, Pattern, set_pattern, verify, verify_per_sample
from megatron_mlmclm.attention.packed import te_refusal
from tests.attention.common import core

LAYERS = 5
EVERY = Pattern("bidirectional", window=(4, 2), global_every=3)


class Layer(Attention):
    """A megatron attention layer of which only what is read here is there."""

    def __init__(self, number: int, core_attention: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.layer_number, self.attn_mask_type = number, AttnMaskType.causal
        self.core_attention = core_attention

    def get_query_key_value_tensors(self, *_, **__):
        raise NotImplementedError


class Model(torch.nn.Module):
    def __init__(self, make_core, first: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(number, make_core(number)) for number in range(first, first + LAYERS))


def ours(number: int = 1) -> torch.nn.Module:
    return core(layer_number=number)


def megatrons(number: int) -> torch.nn.Module:
    config = TransformerConfig(num_layers=LAYERS, hidden_size=32, num_attention_heads=4)
    groups = ProcessGroupCollection()
    groups.tp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return DotProductAttention(config, number, AttnMaskType.causal, "self", pg_collection=groups)


@pytest.mark.parametrize("pattern", [Pattern("causal"), Pattern("bidirectional"), EVERY], ids=str)
def test_every_layer_of_every_chunk_is_set(pattern):
    chunks = [Model(ours), Model(ours, first=LAYERS + 1)]
    set_pattern(chunks, pattern)
    assert verify(chunks, pattern) == 2 * LAYERS


def test_a_layer_of_another_type_is_named():
    chunks = [Model(ours), Model(ours, first=6)]
    set_pattern(chunks, Pattern("bidirectional"))
    chunks[1].layers[2].attn_mask_type = AttnMaskType.causal
    with pytest.raises(AttentionMismatchError, match=r"layer 8: attention is causal, the phase asks for no_mask"):
        verify(chunks, Pattern("bidirectional"))


def test_a_layer_with_another_window_is_named():
    chunks = [Model(ours)]
    set_pattern(chunks, EVERY)
    chunks[0].layers[3].core_attention.window_size = (4, 2)
    with pytest.raises(AttentionMismatchError, match=r"layer 4: window is \(4, 2\), the phase asks for \(-1, -1\)"):
        verify(chunks, EVERY)


def test_megatrons_local_attention_stays_causal_and_is_found_out():
    chunks = [Model(megatrons)]
    set_pattern(chunks, Pattern("causal"))
    assert verify(chunks, Pattern("causal")) == LAYERS
    set_pattern(chunks, Pattern("bidirectional"))
    with pytest.raises(AttentionMismatchError, match=r"layer 1: attention is causal, the phase asks for no_mask"):
        verify(chunks, Pattern("bidirectional"))
    set_pattern(chunks, Pattern("causal", window=(4, 4)))
    with pytest.raises(AttentionMismatchError, match=r"layer 1: window is \(-1, 0\), the phase asks for \(4, 0\)"):
        verify(chunks, Pattern("causal", window=(4, 4)))


@pytest.mark.parametrize("pattern", [Pattern("causal", documents=True), Pattern("prefix")], ids=str)
def test_what_comes_with_a_batch_needs_a_reader(pattern):
    chunks = [Model(ours)]
    set_pattern(chunks, pattern)
    assert verify(chunks, pattern) == verify_per_sample(chunks, [pattern, Pattern("causal")]) == LAYERS
    for check in (
        lambda: verify([Model(megatrons)], pattern),
        lambda: verify_per_sample([Model(megatrons)], [pattern]),
    ):
        with pytest.raises(AttentionMismatchError, match=r"layer 1: DotProductAttention .* SdpaCoreAttention") as said:
            check()
        assert ("documents" if pattern.documents else "per sequence") in str(said.value)


@pytest.mark.parametrize(
    ("pattern", "context", "said"),
    [
        (Pattern("causal", documents=True), 2, "documents under context parallelism"),
        (Pattern("prefix"), 2, "prefix under context parallelism"),
        (Pattern("bidirectional", window=(-1, 4)), 1, "[-1, 4]"),
        (Pattern("bidirectional", window=(4, -1)), 1, "[4, -1]"),
    ],
    ids=str,
)
def test_what_transformer_engine_cannot_do_names_what_can(pattern, context, said):
    reason = te_refusal(pattern, context)
    assert said in reason
    assert "--transformer-impl local" in reason


@pytest.mark.parametrize(
    ("pattern", "context"),
    [
        (Pattern("causal", documents=True), 1),
        (Pattern("bidirectional", window=(4, 4)), 2),
        (Pattern("causal", window=(4, -1)), 1),
        (Pattern("bidirectional", window=(-1, -1)), 1),
        (Pattern("causal"), 4),
    ],
    ids=str,
)
def test_what_it_can_do(pattern, context):
    assert te_refusal(pattern, context) is None
