"""Cross entropy of a linear layer whose logits never stand whole (DESIGN 4a.6).

Rows are taken a chunk at a time: its logits, their loss, and at once their part of both gradients, so that nothing is
computed twice. That needs the factor of each row's loss in forward; backward only scales by what all rows share. Under
tensor parallelism every rank has its own columns, and two small reductions a chunk make the softmax whole. (Liger's
fused linear cross entropy works so on one GPU.) The weight's gradient, as large as the weight, need not stand either:
it is added to where Megatron sums it up over micro-batches, as Megatron's own layers do with theirs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

CHUNK = 2**25  # logits that stand at once: 128 MiB in float32
CHUNKS = 8  # at most: the weight's gradient may be summed over them in its own precision
BLOCK = 2**21  # logits in exact precision at once on a CPU, 8 MiB: they stay in its caches


@dataclass(frozen=True)
class Slice:
    """A rank's part of the vocabulary: its first `real` columns count, the first of them is token `start`."""

    start: int
    real: int
    group: ProcessGroup

    @classmethod
    def of(cls, rows: int, vocab_size: int, group: ProcessGroup) -> "Slice":
        """Of a weight with `rows` rows on this rank; the last ranks have rows beyond `vocab_size`."""
        start = group.rank() * rows
        return cls(start, min(max(vocab_size - start, 0), rows), group)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which `targets` [C] lie here, bool [C], and at which column, int64 [C]; elsewhere any."""
        column = targets - self.start
        inside = (column >= 0) & (column < self.real)
        return inside, torch.where(inside, column, 0)

    def reduce(self, values: Tensor, op: Any) -> None:
        """`values` over all ranks of the group, in place."""
        if self.group.size() > 1:
            all_reduce(values, op=op, group=self.group)


@dataclass(frozen=True)
class MainGrad:
    """Where Megatron adds up a weight's gradient over micro-batches.

    Attributes:
        weight: its `main_grad` [columns, h] is what grows; Megatron's hook is told that it did.
        add: (x [C, h], gradient of the logits [C, columns], main_grad [columns, h]) adds their product to the last.
        scale: what backward will get for each row: it has to be known in forward. A loss scale, else 1.
    """

    weight: Tensor
    add: Callable[[Tensor, Tensor, Tensor], None]
    scale: float | Tensor = 1.0


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, factors: Tensor, part: Slice, main_grad: MainGrad | None = None
) -> Tensor:
    """Cross entropy in nats times `factors` [C], of `hidden` [C, h] @ `weight` [columns, h] transposed, [C].

    float32, or float64 where `hidden` is. `hidden` is the same on all ranks of the group; so is its gradient, which is
    reduced here. What backward gets must be the same for all rows, as from their sum; `factors` are for what differs.
    With `main_grad` the weight's gradient goes there, in forward.
    Errors: RuntimeError in backward where what it gets differs between rows, or from `main_grad.scale`.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, factors, part, main_grad, torch.is_grad_enabled())


@torch.no_grad()
def scores(hidden: Tensor, weight: Tensor, targets: Tensor, part: Slice) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats, [C], and the token with the largest logit, int64 [C]; of equals the first."""
    losses, tokens = [], []
    for rows, logits in _chunks(hidden, weight, part):
        tokens.append(_likeliest(logits, part))
        losses.append(_exponentiate(logits, targets[rows], part)[0])
    return torch.cat(losses), torch.cat(tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        factors: Tensor,
        part: Slice,
        main_grad: MainGrad | None,
        train: bool,
    ) -> Tensor:
        ctx.main_grad = main_grad if train and ctx.needs_input_grad[1] else None
        of_hidden = torch.empty_like(hidden) if train and ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if train and ctx.needs_input_grad[1] and not main_grad else None
        losses = []
        for rows, logits in _chunks(hidden, weight, part):
            loss, total = _exponentiate(logits, targets[rows], part)
            losses.append(loss * factors[rows])
            inside, column = part.places(targets[rows])
            if part.real:  # softmax less one at the target, times the total
                logits.scatter_add_(1, column[:, None], torch.where(inside, -total, 0.0)[:, None].to(logits.dtype))
            scale = (factors[rows] / total)[:, None]
            if of_hidden is not None:
                of_hidden[rows] = (logits @ weight[: part.real]).to(scale.dtype) * scale
            if of_weight is not None:
                scaled = (hidden[rows] * scale).to(hidden.dtype)
                of_weight[: part.real].addmm_(logits.t(), scaled, beta=1 if rows.start else 0)
            elif ctx.main_grad and part.real:
                scaled = (hidden[rows] * (scale * main_grad.scale)).to(hidden.dtype)
                main_grad.add(scaled, logits, main_grad.weight.main_grad[: part.real])
        if of_hidden is not None:
            part.reduce(of_hidden, ReduceOp.SUM)
        if of_weight is not None:
            of_weight[part.real :] = 0  # Megatron's padding
        ctx.gradients = (of_hidden, of_weight)
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shared = grad[0]
        if grad.stride(0) and not torch.equal(grad, shared.expand_as(grad)):  # of a sum the stride is 0
            raise RuntimeError("the gradient of a chunked loss differs between rows: pass what differs as factors")
        of_hidden, of_weight = (each if each is None else each.mul_(shared) for each in ctx.gradients)
        ctx.gradients = ()  # theirs now
        if ctx.main_grad:
            torch._assert_async(shared == ctx.main_grad.scale, "a chunked loss was scaled after it was added up")
            weight = ctx.main_grad.weight
            weight.grad_added_to_main_grad = True
            of_weight = torch.empty_like(weight)  # Megatron's hook wants a gradient to fire, and drops it unread
        return of_hidden, of_weight, None, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, part: Slice) -> Iterator[tuple[slice, Tensor]]:
    """Some rows and their logits [rows, part.real] in `hidden`'s dtype; the next chunk overwrites them."""
    count, columns = len(hidden), weight[: part.real].t()
    chunks = min(CHUNKS, count, -(-count * len(weight) // CHUNK))  # as many on every rank: each ends in reductions
    size = -(-count // (16 * chunks)) * 16  # an even number suits the products
    buffer = hidden.new_empty(size, part.real)
    for first in range(0, count, size):
        rows = slice(first, min(first + size, count))
        yield rows, torch.mm(hidden[rows], columns, out=buffer[: rows.stop - first])


def _exponentiate(logits: Tensor, targets: Tensor, part: Slice) -> tuple[Tensor, Tensor]:
    """The loss and the sum of exponentials less the largest logit, both [rows] over all ranks.

    `logits` [rows, columns] become those exponentials.
    """
    inside, column = part.places(targets)
    own = torch.zeros(len(logits), dtype=_exact(logits), device=logits.device)
    top = torch.full_like(own, -torch.inf)
    if part.real:
        own = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), 0.0).to(own.dtype)
        top = logits.amax(1).to(own.dtype)
    part.reduce(top, ReduceOp.MAX)
    block = len(logits) if logits.is_cuda else max(1, BLOCK // max(part.real, 1))
    total = [_exponentials(*both).sum(1) for both in zip(logits.split(block), top.split(block), strict=True)]
    sums = torch.stack([torch.cat(total), own])
    part.reduce(sums, ReduceOp.SUM)
    return top + sums[0].log() - sums[1], sums[0]


def _exponentials(logits: Tensor, top: Tensor) -> Tensor:
    """exp(logits - top) in exact precision; `logits` become the same in their own."""
    exact = logits if logits.dtype == top.dtype else logits.to(top.dtype)
    exact.sub_(top[:, None]).exp_()
    if exact is not logits:
        logits.copy_(exact)
    return exact


def _likeliest(logits: Tensor, part: Slice) -> Tensor:
    """The token with the largest of `logits` [rows, columns] over all ranks, int64 [rows]; of equals the first."""
    nowhere = torch.iinfo(torch.int64).max
    best = torch.full((len(logits),), -torch.inf, dtype=_exact(logits), device=logits.device)
    token = torch.full_like(best, nowhere, dtype=torch.int64)
    if part.real:
        value, column = logits.max(1)
        best, token = value.to(best.dtype), column + part.start
    highest = best.clone()
    part.reduce(highest, ReduceOp.MAX)
    token.masked_fill_(best != highest, nowhere)
    part.reduce(token, ReduceOp.MIN)
    return token


def _exact(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
