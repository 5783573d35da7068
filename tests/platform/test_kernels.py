"""Kernels for a CPU against Megatron's own forms of the same, in values and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _rotate_half

from megatron_mlmclm.platform import kernels

EXACT = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}


def plain_swiglu(inputs):
    gate, linear = inputs.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * linear


def plain_rotary(t, freqs, *_):
    return t * freqs.cos().to(t.dtype) + _rotate_half(t, False) * freqs.sin().to(t.dtype)


def gradients(function, *inputs):
    """The result and the gradient of the first input, for a gradient that differs from place to place."""
    first = inputs[0].detach().clone().requires_grad_()
    output = function(first, *inputs[1:])
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return output, *torch.autograd.grad(output, first, weights)


@pytest.mark.parametrize("dtype", EXACT)
@given(length=st.integers(1, 150), batch=st.integers(1, 3), width=st.integers(1, 9), seed=st.integers(0, 9))
def test_swiglu(dtype, length, batch, width, seed):
    inputs = torch.randn(length, batch, 2 * width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    ours = gradients(lambda x: kernels.swiglu(x, None), inputs)
    torch.testing.assert_close(ours, gradients(plain_swiglu, inputs), **EXACT[dtype])
    bias = torch.ones(2 * width, dtype=dtype)
    ours = gradients(lambda x: kernels.swiglu(x, bias), inputs)
    torch.testing.assert_close(ours, gradients(lambda x: plain_swiglu(x + bias), inputs), **EXACT[dtype])


@pytest.mark.parametrize("dtype", EXACT)
def test_rotary(dtype):
    apply = kernels.rotary(None)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(7, 2, 3, 30, generator=generator).to(dtype)
    freqs = torch.randn(7, 1, 1, 10, generator=generator, dtype=torch.float64)  # halves that differ, too
    for t in qkv.split(10, dim=-1):  # views with gaps, as Megatron's are
        expected = gradients(plain_rotary, t, freqs)
        torch.testing.assert_close(gradients(apply, t, freqs), expected, **EXACT[dtype])
    scaled = apply(qkv[..., :10], freqs, mscale=2.0)
    torch.testing.assert_close(scaled, 2 * apply(qkv[..., :10], freqs), **EXACT[dtype])


@pytest.mark.parametrize("other", [{"rotary_interleaved": True}, {"mla_rotary_interleaved": True}, {}])
def test_other_rotary_embeddings_stay_megatrons(other):
    asked = []
    freqs = torch.randn(3, 1, 1, 8 if other else 4)
    kernels.rotary(lambda *args: asked.append(args))(torch.randn(3, 2, 2, 8), freqs, **other)
    assert len(asked) == 1
    assert asked[0][2:4] == (bool(other.get("rotary_interleaved")), bool(other.get("mla_rotary_interleaved")))


def test_a_weights_gradient_is_added_to_what_is_there(monkeypatch):
    monkeypatch.setattr(kernels, "CAST_ROWS", 3)
    inputs, of_output, before = torch.randn(6, 5).bfloat16(), torch.randn(6, 8).bfloat16(), torch.randn(8, 5)
    for dtype in (torch.float32, torch.bfloat16):  # of the layer; sums are float32
        total = before.clone()
        kernels.GradAccumulation.wgrad_gemm_accum_fp32(inputs.to(dtype), of_output.to(dtype), total)
        torch.testing.assert_close(total, before + of_output.float().t() @ inputs.float(), rtol=0.02, atol=0.02)
