"""On a CPU, what are fused kernels on a GPU: no copies that only serve to put halves together."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 64  # of an activation at once: a few hundred KiB, which stay in a core's cache between two operations
CAST_ROWS = 8192  # of a weight's gradient at once, where it has to be cast


class GradAccumulation:
    """As Apex's `fused_weight_gradient_mlp_cuda`: a layer's weight gradient is added to where it is summed up."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, of_output: Tensor, main_grad: Tensor) -> None:
        """Add `of_output` [n, out] transposed times `inputs` [n, in] to `main_grad` [out, in]."""
        if main_grad.dtype == inputs.dtype:
            main_grad.addmm_(of_output.t(), inputs)
            return
        for some, whole in zip(of_output.t().split(CAST_ROWS), main_grad.split(CAST_ROWS), strict=True):
            whole.add_(some @ inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def swiglu(inputs: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """In the place of Megatron's `bias_swiglu_impl`: [..., 2 f] -> [..., f], silu of the first half by the second."""
    return _SwiGlu.apply(inputs.contiguous() if bias is None else inputs + bias)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        output = inputs.new_empty(*inputs.shape[:-1], inputs.shape[-1] // 2)
        for both, out in _rows(inputs, output):
            gate, linear = both.chunk(2, dim=-1)
            torch.mul(torch.nn.functional.silu(gate), linear, out=out)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        of_inputs = torch.empty_like(inputs)
        for both, of_both, of_output in _rows(inputs, of_inputs, grad.contiguous()):
            gate, linear = both.chunk(2, dim=-1)
            of_gate, of_linear = of_both.chunk(2, dim=-1)
            torch.ops.aten.silu_backward.grad_input(of_output * linear, gate, grad_input=of_gate)
            torch.mul(torch.nn.functional.silu(gate), of_output, out=of_linear)
        return of_inputs


def _rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows of all of them at a time, as matrices."""
    return zip(*(tensor.view(-1, tensor.shape[-1]).split(ROWS) for tensor in tensors), strict=True)


def rotary(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In the place of Megatron's `_apply_rotary_pos_emb_bshd`; `original` for partial and interleaved embeddings."""

    def apply(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        multi_latent_attention: bool | None = None,
    ) -> Tensor:
        other = rotary_interleaved or mla_rotary_interleaved or multi_latent_attention
        if other or freqs.shape[-1] != t.shape[-1]:
            return original(t, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, multi_latent_attention)
        return _Rotary.apply(t, (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype))

    return apply


class _Rotary(torch.autograd.Function):
    """t [s, ..., d]: (first, second half of d) -> (first cos - second sin, second cos + first sin)."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (one, two), (sin_one, sin_two) = t.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        output = torch.mul(t, cos)
        first, second = output.chunk(2, dim=-1)
        first.addcmul_(two, sin_one, value=-1)
        second.addcmul_(one, sin_two)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (one, two), (sin_one, sin_two) = grad.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        of_t = torch.mul(grad, cos)
        first, second = of_t.chunk(2, dim=-1)
        first.addcmul_(two, sin_two)
        second.addcmul_(one, sin_one, value=-1)
        return of_t, None, None
