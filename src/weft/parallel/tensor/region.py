"""Owns the tensor-parallel region: one entry per block side, and weight gradients computed while the input gradient travels.

Note [Region order]
    Autograd runs the ready node that was created last. A region creates its nodes in this order,

        forward:   settle ─ later(q) ─ later(k) ─ later(v) ─ enter ─ linear q, k, v ─ ...
        backward:  settle <─ later(q), later(k), later(v) <─ enter <─ linear v, k, q <─ ...
                   wait       dW = dy^T x                   start    dx only
                              ^^^^^^^^^^^ runs while the sum of dx over the axis is under way

    so that the backward of every linear yields only its input gradient; `enter` starts the reduction of their sum; the
    weight gradients are computed by the `later` nodes meanwhile; `settle` waits. Between the nodes travel placeholders that
    hold no memory. Weight gradients still reach `.grad` through autograd's own accumulation, so hooks on parameters work.

    Under a split backward (Note [Split backward]) weight gradients come later still: there are no `later` nodes then, and
    the linears are torch's own, which that can take apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.core.mesh import Axis
from weft.parallel.pipeline.split_backward import active_split_backward

SEQ_DIM = 1
"""Dim of the sequence in x_BSD."""


@dataclass
class Errand:
    """What the nodes of one region leave for each other during one backward."""

    work: Work | None = None


@dataclass
class Loan:
    """The weight that one linear uses in one forward, and what its backward leaves for the weight gradient."""

    weight: Tensor
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    """Where a tensor-parallel region stands: over which axis, and whether tokens are cut along the sequence outside."""

    comm: Comm
    axis: Axis
    sequence: bool

    def open(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, tuple[Loan, ...]]:
        """Enter the region: the whole x for every rank, and the weights to be used inside it.

        Under sequence parallelism x_BSD holds this rank's part of the sequence and is gathered along dim 1; its gradient is
        reduce-scattered. Otherwise x passes as it is and its gradient is all-reduced.
        """
        errand = Errand()
        x = _Settle.apply(x, errand)  # type: ignore[no-untyped-call]
        loans = tuple(Loan(weight) for weight in weights)
        if active_split_backward() is None:
            for loan in loans:
                loan.weight = _Later.apply(loan.weight, loan)  # type: ignore[no-untyped-call]
        return _Enter.apply(x, errand, self), loans  # type: ignore[no-untyped-call]

    def leave(self, y: Tensor) -> Tensor:
        """Sum y over the ranks; under sequence parallelism each keeps its part of the sequence."""
        return (
            ops.reduce_scatter(y, self.comm, self.axis, dim=SEQ_DIM)
            if self.sequence
            else ops.reduce_from_region(y, self.comm, self.axis)
        )


def linear(x: Tensor, loan: Loan, bias: Tensor | None) -> Tensor:
    """x W^T + b whose weight gradient is computed later; see Note [Region order]."""
    if active_split_backward() is not None:
        return nn.functional.linear(x, loan.weight, bias)
    y: Tensor = _Linear.apply(x, loan.weight, bias, loan)  # type: ignore[no-untyped-call]
    return y


def _placeholder(like: Tensor, shape: torch.Size) -> Tensor:
    """A gradient-shaped tensor without memory."""
    return like.new_zeros(()).expand(shape)


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, errand: Errand) -> Tensor:
        ctx.errand = errand
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        assert ctx.errand.work is not None, "the region was settled before its entry ran backward"
        return ctx.errand.work.wait(), None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, errand: Errand, region: Region) -> Tensor:
        ctx.errand, ctx.region, ctx.shape = errand, region, x.shape
        return region.comm.all_gather(x, region.axis, dim=SEQ_DIM) if region.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        region: Region = ctx.region
        if region.sequence:
            ctx.errand.work = region.comm.start_reduce_scatter(dx, region.axis, dim=SEQ_DIM)
        else:
            ctx.errand.work = region.comm.start_all_reduce(dx, region.axis)
        return _placeholder(dx, ctx.shape), None, None


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, loan: Loan) -> Tensor:
        ctx.loan = loan
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        pairs = ctx.loan.pairs
        gradient = torch.mm(*_flat(pairs.pop()))
        while pairs:
            gradient.addmm_(*_flat(pairs.pop()))
        return gradient, None


def _flat(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    dy, x = pair
    return dy.flatten(0, -2).t(), x.flatten(0, -2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, loan: Loan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.loan = loan
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight:
            ctx.loan.pairs.append((dy, x))
        return (
            dy @ weight if needs_x else None,
            _placeholder(dy, weight.shape) if needs_weight else None,
            dy.flatten(0, -2).sum(0) if needs_bias else None,
            None,
        )
