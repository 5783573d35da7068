"""Liger's loss, on a CPU by Triton's interpreter, against ours; and where it is taken."""

import os
import subprocess
import sys

import pytest
import torch

from megatron_mlmclm.model import form_of, fused

# A process of its own: Triton reads at import whether it is to interpret.
COMPARE = """
import torch
from megatron_mlmclm.model.chunked import Slice, chunked_cross_entropy
from megatron_mlmclm.model.fused import fused_cross_entropy
from tests.model.test_chunked import Alone

torch.manual_seed(0)
hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(320, 16, requires_grad=True)
targets, factors = torch.randint(301, (40,)), torch.rand(40)
results = []
for losses in (
    fused_cross_entropy(hidden, weight[:301], targets, factors),
    chunked_cross_entropy(hidden, weight, targets, factors, Slice.of(320, 301, Alone())),
):
    results.append((losses, *torch.autograd.grad(losses.sum(), (hidden, weight))))
torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
assert results[0][2][301:].abs().max() == 0
"""


def test_it_is_our_loss():
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    subprocess.run([sys.executable, "-c", COMPARE], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)


def test_it_is_taken_where_one_gpu_has_the_whole_vocabulary(monkeypatch):
    assert form_of("auto", 1) == "chunked"  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fused.platform, "has_liger", lambda: True)
    assert (form_of("auto", 1), form_of("auto", 2), form_of("dense", 1)) == ("fused", "chunked", "dense")
    monkeypatch.setattr(fused.platform, "has_liger", lambda: False)
    assert form_of("auto", 1) == "chunked"
