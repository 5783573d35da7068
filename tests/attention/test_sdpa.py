"""Our core attention alone, against plain softmax over a mask written out position by position."""

import itertools

import pytest
import torch

from megatron_mlmclm.attention import Extent, Pattern, pattern_params
from tests.attention import dense
from tests.attention.common import core, inputs

LENGTH = 24
CUTS = (3, 4, 11, 17)
PADDED = (LENGTH, 19)


def extents(batch: int, padded: bool) -> list[Extent]:
    """Of a batch whose first sequence has other documents than the second."""
    lengths = [length - 5 if padded else length for length in (LENGTH, LENGTH - 0)]
    return [dense.extent(lengths[i], CUTS[i : 3 + i], prefix=9 - 2 * i) for i in range(batch)]


def reference(query, key, value, patterns, extents) -> torch.Tensor:
    outputs = []
    for place, (pattern, extent) in enumerate(zip(patterns, extents, strict=True)):
        q, k, v = (t[:, place].transpose(0, 1) for t in (query, key, value))
        outputs.append(dense.attend(q, k, v, dense.visible(pattern, extent, len(query))))
    return torch.stack(outputs, dim=1)


def compare(attention, patterns, extents, length=LENGTH, tolerance=2e-5):
    """Output and all gradients, under a random gradient of the output."""
    ours, theirs = inputs(length, len(patterns)), inputs(length, len(patterns))
    out = attention(*ours, None, packed_seq_params=pattern_params(patterns, length, extents))
    expected = reference(*theirs, patterns, extents)
    assert (out - expected).abs().max() < tolerance
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad - other.grad).abs().max() < tolerance
    return out, ours


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", dense.PATTERNS)
def test_output_and_gradients(name, batch, padded):
    compare(core(), [dense.PATTERNS[name]] * batch, extents(batch, padded))


@pytest.mark.parametrize("name", dense.PATTERNS)
def test_with_tiles_smaller_than_the_sequence(name, monkeypatch):
    monkeypatch.setattr("megatron_mlmclm.attention.tiles.TILE", 4)
    pattern, extent = dense.PATTERNS[name], dense.extent(37, (10, 12, 30), prefix=13)
    from megatron_mlmclm.attention.tiles import tiles_of

    tiles_of.cache_clear()
    compare(core(), [pattern], [extent], length=40)
    tiles_of.cache_clear()


def test_a_batch_of_all_patterns():
    patterns = list(dense.PATTERNS.values())
    compare(core(), patterns, [dense.extent(LENGTH - i, CUTS, prefix=5) for i in range(len(patterns))])


def test_padding_gives_zeros_and_takes_no_gradient():
    out, (query, key, value) = compare(core(), [Pattern("bidirectional")], [Extent(15)])
    assert not out[15:].any()
    for each in (query, key, value):
        assert not each.grad[15:].any()
        assert each.grad[:15].abs().amax((1, 2, 3)).all()


def test_a_sequence_of_nothing_but_padding():
    out, (query, *_) = compare(core(), [Pattern("causal", documents=True)], [Extent(0)])
    assert out.requires_grad
    assert query.grad is not None
    assert not out.any()


@pytest.mark.parametrize(("every", "layer_number"), itertools.product((1, 2, 3), (1, 2, 3, 4, 5)))
def test_every_kth_layer_sees_all(every, layer_number):
    pattern = Pattern("bidirectional", window=(4, 4), global_every=every)
    attention = core(layer_number=layer_number)
    query, key, value = inputs(LENGTH, 1)
    out = attention(query, key, value, None, packed_seq_params=pattern_params([pattern], LENGTH))
    seen = dense.visible(pattern, Extent(LENGTH), LENGTH, layer_number)
    assert seen.all() == ((layer_number - 1) % every == 0)
    expected = dense.attend(*(t[:, 0].transpose(0, 1) for t in (query, key, value)), seen)
    assert (out[:, 0] - expected).abs().max() < 1e-5


def test_bfloat16():
    query, key, value = (t.detach().bfloat16() for t in inputs(LENGTH, 1))
    params = pattern_params([dense.PATTERNS["bidirectional window"]], LENGTH)
    out = core()(query, key, value, None, packed_seq_params=params)
    expected = reference(*(t.float() for t in (query, key, value)), params.patterns, params.extents)
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).abs().max() < 2e-2


def test_dropout_drops_in_training_alone():
    attention = core(dropout=0.5)
    query, key, value = (t.detach() for t in inputs(LENGTH, 1))
    params = pattern_params([dense.PATTERNS["bidirectional documents"]], LENGTH, [dense.extent(LENGTH, CUTS)])
    ones = torch.ones_like(value)
    torch.manual_seed(5)
    dropped = attention(query, key, ones, None, packed_seq_params=params)
    # 0 or 2 for each key of a document; on average what it was.
    assert dropped.std() > 0.1
    assert dropped.mean() == pytest.approx(1.0, abs=0.15)
    attention.eval()
    assert torch.allclose(attention(query, key, ones, None, packed_seq_params=params), torch.ones_like(dropped))
