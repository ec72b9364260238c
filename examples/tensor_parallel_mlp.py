"""Tensor parallelism by hand: two linears, sharded so that there is one all_reduce forward and one backward.

    .venv/bin/python examples/tensor_parallel_mlp.py

             COLUMN: outputs are sharded         ROW: inputs are sharded

    x ──┬──> W1[top]    ──> h[left]  ──> tanh ──> W2[left]  ──> part ─┐
        │    rank 0                                                   + all_reduce ──> y on both ranks
        └──> W1[bottom] ──> h[right] ──> tanh ──> W2[right] ──> part ─┘
             rank 1

Both ranks have all of x, so the column linear communicates nothing; its sharded output is the
sharded input of the row linear; and the outputs of that are two partial sums. Backward is the
reverse: the gradient of y is replicated, so the row linear communicates nothing, and the column
linear yields two partial sums of the gradient of x:

    column   dx = sum over ranks of dh_i W1_i   (all_reduce)     dW1_i = dh_i^T x   (local)

dW1 does not need that sum: the all_reduce is started first and waited for last, and dW1 is computed
meanwhile.
Source: Shoeybi et al. 2019, Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from example_tools import gradient, same, say
from torch import Tensor, nn

import weft
from weft import Comm

RANKS, ROWS, D, F = 2, 8, 6, 16


class ColumnLinear(torch.autograd.Function):
    """x_BD, weight_FD, bias_F -> x W^T + b, this rank's outputs F of all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, comm: Comm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        reducing = ctx.comm.start_all_reduce_(
            grad @ weight, "tp"
        )  # first: the layer before waits for it
        weight_grad, bias_grad = grad.T @ x, grad.sum(0)  # overlap: computed during the all_reduce
        return reducing.wait(), weight_grad, bias_grad, None


def column_linear(x: Tensor, weight: Tensor, bias: Tensor, comm: Comm) -> Tensor:
    return ColumnLinear.apply(x, weight, bias, comm)  # type: ignore[no-any-return, no-untyped-call]


class RowLinear(torch.autograd.Function):
    """x_BF (this rank's inputs F of all of them), weight_DF, bias_D (replicated) -> the same y_BD
    on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, comm: Comm) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (
            comm.all_reduce_(x @ weight.T, "tp") + bias
        )  # after the sum, else each rank would add the bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, grad.sum(0), None  # replicated: nothing to communicate


def row_linear(x: Tensor, weight: Tensor, bias: Tensor, comm: Comm) -> Tensor:
    return RowLinear.apply(x, weight, bias, comm)  # type: ignore[no-any-return, no-untyped-call]


def own(tensors: Iterable[Tensor], rank: int) -> tuple[Tensor, ...]:
    """This rank's part of W1, b1, W2 and b2, or of their gradients."""
    w1, b1, w2, b2 = tensors
    return w1.chunk(RANKS, 0)[rank], b1.chunk(RANKS, 0)[rank], w2.chunk(RANKS, 1)[rank], b2


def check(how: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """What the ranks computed, against their part of what one process did."""
    for name, mine, right in zip(
        ("output", "dx", "dW1", "db1", "dW2", "db2"), got, want, strict=True
    ):
        same(f"{how}: {name}", mine, right)


def main() -> None:
    comm = weft.init(f"tp{RANKS}", device="cpu")
    rank = comm.index("tp")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(D, F), nn.Tanh(), nn.Linear(F, D)).double()
    x, target = torch.randn(ROWS, D, dtype=torch.float64), torch.randn(ROWS, D, dtype=torch.float64)

    alone_x = x.clone().requires_grad_()  # one process
    y = whole(alone_x)
    nn.functional.mse_loss(y, target).backward()
    want = (y, gradient(alone_x), *own(map(gradient, whole.parameters()), rank))

    w1, b1, w2, b2 = (
        part.detach().clone().requires_grad_() for part in own(whole.parameters(), rank)
    )
    hand_x = x.clone().requires_grad_()
    y = row_linear(torch.tanh(column_linear(hand_x, w1, b1, comm)), w2, b2, comm)
    nn.functional.mse_loss(y, target).backward()
    check("by hand", (y, *map(gradient, (hand_x, w1, b1, w2, b2))), want)
    say(
        comm,
        f"by hand: each rank has W1[{w1.shape[0]} of {F}, {D}] and W2[{D}, {w2.shape[1]} of {F}]",
    )

    column = weft.ColumnParallelLinear(D, F, comm=comm, dtype=torch.float64)
    row = weft.RowParallelLinear(F, D, comm=comm, dtype=torch.float64)
    params = (*column.parameters(), *row.parameters())
    with torch.no_grad():
        for param, part in zip(params, (w1, b1, w2, b2), strict=True):
            param.copy_(part)
    weft_x = x.clone().requires_grad_()
    y = row(torch.tanh(column(weft_x)))
    nn.functional.mse_loss(y, target).backward()
    check("weft", (y, *map(gradient, (weft_x, *params))), want)
    say(
        comm,
        "weft.ColumnParallelLinear, weft.RowParallelLinear: the same, for any sizes, any axis, any device",
    )

    comm.barrier("tp")
    say(
        comm,
        f"\nequal: output and all 5 gradients on {RANKS} ranks are those of one process, by hand and by weft",
    )


if __name__ == "__main__":
    main()
