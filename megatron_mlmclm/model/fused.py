"""Cross entropy of a linear layer by Liger's Triton kernels, where one GPU has the whole vocabulary.

What Liger has for a vocabulary that is cut over ranks wants shards of one size, so that Megatron's padding would take
part in the softmax; there `model/chunked.py` does the same without kernels of its own.
"""

import torch
from torch import Tensor

from megatron_mlmclm import platform


def has_fused_loss() -> bool:
    """Whether there are a GPU and Liger."""
    return torch.cuda.is_available() and platform.has_liger()


def fused_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
    """Cross entropy in nats times `factors` [C], of `hidden` [C, h] @ `weight` [columns, h] transposed, float32 [C].

    The weight's gradient is summed up in float32. It needs bfloat16 or float32, and a GPU (or Triton's interpreter).
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none", accum_dtype=torch.float32)
    return losses * factors
