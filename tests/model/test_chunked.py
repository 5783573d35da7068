"""The loss whose logits never stand whole, against torch's cross entropy in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mlmclm.model import chunked
from megatron_mlmclm.model.chunked import MainGrad, Slice, chunked_cross_entropy, scores
from megatron_mlmclm.platform.kernels import GradAccumulation


class Alone:
    """A process group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK", 50)
    monkeypatch.setattr(chunked, "BLOCK", 30)


@given(rows=st.integers(1, 9), vocab=st.integers(1, 40), padding=st.integers(0, 9), seed=st.integers(0, 99))
def test_losses_and_gradients_are_cross_entropys(rows, vocab, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = (10 * torch.randn(rows, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(vocab + padding, 5, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    factors = torch.randn(rows, generator=generator, dtype=torch.float64)
    part = Slice.of(len(weight), vocab, Alone())
    loss = chunked_cross_entropy(hidden, weight, targets, factors, part)
    expected = torch.nn.functional.cross_entropy(hidden @ weight[:vocab].t(), targets, reduction="none") * factors
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets, factors, part), loss)
    ours = torch.autograd.grad(3 * loss.sum(), (hidden, weight))
    theirs = torch.autograd.grad(3 * expected.sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_what_differs_between_rows_is_refused_in_backward():
    hidden, weight = torch.randn(3, 5, requires_grad=True), torch.randn(7, 5)
    part = Slice.of(7, 7, Alone())
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([1, 2, 3]), torch.ones(3), part)
    with pytest.raises(RuntimeError, match="differs between rows"):
        (loss * torch.tensor([1.0, 2.0, 1.0])).sum().backward()
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([1, 2, 3]), torch.ones(3), part)
    (loss * torch.tensor([2.0, 2.0, 2.0])).sum().backward()  # the same for all, though not of a bare sum
    torch.nn.functional.cross_entropy(hidden @ weight.t(), torch.tensor([1, 2, 3]), reduction="sum").mul(-2).backward()
    assert hidden.grad.abs().max() < 1e-5


def test_the_gradient_of_the_weight_is_added_where_megatron_sums_it_up():
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 5, requires_grad=True), torch.nn.Parameter(torch.randn(17, 5))
    targets, factors = torch.randint(11, (20,)), torch.rand(20)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(17, 5), False
    main_grad = MainGrad(weight, GradAccumulation.wgrad_gemm_accum_fp32, torch.tensor([8.0]))
    loss = chunked_cross_entropy(hidden, weight, targets, factors, Slice.of(17, 11, Alone()), main_grad).sum()
    expected = torch.nn.functional.cross_entropy(hidden @ weight[:11].t(), targets, reduction="none") @ factors
    wanted = torch.autograd.grad(8 * expected, (hidden, weight))
    (8 * loss).backward()
    torch.testing.assert_close(hidden.grad, wanted[0])
    torch.testing.assert_close(weight.main_grad, 1 + wanted[1])
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape  # unread; the hook on it is what tells Megatron
    loss = chunked_cross_entropy(hidden, weight, targets, factors, Slice.of(17, 11, Alone()), main_grad).sum()
    with pytest.raises(RuntimeError, match="scaled after it was added up"):
        (7 * loss).backward()


def test_nothing_is_added_for_a_frozen_weight_or_without_gradients():
    hidden, weight = torch.randn(4, 5, requires_grad=True), torch.nn.Parameter(torch.randn(9, 5))
    weight.main_grad, part, targets = torch.zeros(9, 5), Slice.of(9, 9, Alone()), torch.tensor([1, 2, 3, 0])
    main_grad = MainGrad(weight, GradAccumulation.wgrad_gemm_accum_fp32)
    with torch.no_grad():
        chunked_cross_entropy(hidden, weight, targets, torch.ones(4), part, main_grad)
    weight.requires_grad_(False)
    chunked_cross_entropy(hidden, weight, targets, torch.ones(4), part, main_grad).sum().backward()
    assert not weight.main_grad.any()
    assert hidden.grad.any()


@given(vocab=st.integers(1, 40), padding=st.integers(0, 9), seed=st.integers(0, 99))
def test_the_likeliest_token_is_the_first_of_the_largest(vocab, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-1, 2, (9, 3), generator=generator).float()  # many ties
    weight = torch.randint(-1, 2, (vocab + padding, 3), generator=generator).float()
    targets = torch.randint(vocab, (9,), generator=generator)
    loss, found = scores(hidden, weight, targets, Slice.of(len(weight), vocab, Alone()))
    logits = hidden @ weight[:vocab].t()
    assert found.tolist() == [row.tolist().index(row.max()) for row in logits]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))


def test_in_bf16_sums_are_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16).bfloat16().requires_grad_(), torch.randn(97, 16).bfloat16().requires_grad_()
    targets = torch.randint(97, (50,))
    loss = chunked_cross_entropy(hidden, weight, targets, torch.ones(50), Slice.of(97, 97, Alone()))
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
