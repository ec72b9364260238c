"""Owns attention of queries that stay at home to keys and values that come piece by piece, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.core.sequence import Meeting, meeting
from weft.parallel.context import block
from weft.parallel.context.kernels import Scores
from weft.parallel.context.pair import Pair, wide


class Sum(Protocol):
    """Gradients of everybody's keys and values, on their way home."""

    def add(self, source: int, columns: slice, dk: Tensor, dv: Tensor) -> None:
        """Gradients for some columns of rank `source`'s piece; asked once a piece, in the order in which pieces came."""
        ...

    def finish(self) -> Pair:
        """The sum over all ranks for this rank's own piece."""
        ...


class Route(Protocol):
    """How pieces of keys and values travel between the ranks that share a sequence."""

    @property
    def index(self) -> int: ...

    def pieces(self, own: Pair) -> Iterator[tuple[int, Pair]]:
        """(source, its keys and values), this rank's own first; what comes next travels while a piece is in hand."""
        ...

    def sum(self, own: Pair, dtype: torch.dtype) -> Sum:
        """An empty sum in this type, for pieces shaped like `own`."""
        ...


@dataclass(frozen=True)
class Attention:
    """One attention over a sequence that is cut among ranks as `core/sequence.py` says.

    Attributes:
        documents: documents_BS of each rank's columns, by rank; None: every sequence is one document.
    """

    route: Route
    scale: float
    causal: bool
    documents: tuple[Tensor, ...] | None = None

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor) -> Tensor:
        """This rank's q, k and v -> its out_BSHW; differentiable."""
        return cast(Tensor, _OverPieces.apply(q_BSHK, k_BSGK, v_BSGW, self))  # type: ignore[no-untyped-call]

    def meet(self, source: int, columns: int) -> tuple[Meeting, Scores]:
        """What this rank's queries see of the piece of `source`."""
        index = self.route.index
        met = meeting(index, source, columns=columns, causal=self.causal)
        if self.documents is None:
            return met, Scores(self.scale, causal=met.causal)
        own, theirs = self.documents[index][:, met.queries], self.documents[source][:, met.keys]
        same = own[:, None, :, None] == theirs[:, None, None, :]
        return met, Scores(self.scale, mask=same.tril() if met.causal else same)


class _OverPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, attention: Attention) -> Tensor:
        q, own, total = _heads_first(q_BSHK), Pair.of(k_BSGK, v_BSGW), _Total()
        for source, piece in attention.route.pieces(own):
            met, scores = attention.meet(source, own.columns)
            k, v = _heads_first(piece.keys[:, met.keys]), _heads_first(piece.values[:, met.keys])
            total.add(met.queries, *block.attend(q[:, :, met.queries], k, v, scores))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, own.line, out, total.lse)
        ctx.attention, ctx.shapes = attention, (own.keys_shape, own.values_shape)  # not `own`: it holds its line
        return _heads_first(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHW: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, line, out, lse = ctx.saved_tensors
        attention, own, grad = ctx.attention, Pair(line, *ctx.shapes), _heads_first(grad_BSHW.contiguous())
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        gradients = attention.route.sum(own, dq.dtype)
        for source, piece in attention.route.pieces(own):
            met, scores = attention.meet(source, own.columns)
            k, v = _heads_first(piece.keys[:, met.keys]), _heads_first(piece.values[:, met.keys])
            mine = [x[:, :, met.queries] for x in (grad, q, out, lse)]
            share = block.attend_backward(mine[0], mine[1], k, v, mine[2], mine[3], scores)
            dq[:, :, met.queries] += share.q
            gradients.add(source, met.keys, _heads_first(share.k), _heads_first(share.v))
        home = gradients.finish()
        return _heads_first(dq.to(q.dtype)), home.keys.to(q.dtype), home.values.to(q.dtype), None


class _Total:
    """Output and log-sum-exp over the blocks so far: see Note [Blocks add up]. The first block has every query."""

    out: Tensor
    lse: Tensor

    def __init__(self) -> None:
        self.is_empty = True

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        if self.is_empty:
            self.out, self.lse, self.is_empty = out.to(wide(out.dtype)), lse, False
            return
        mine, sums = self.out[:, :, queries], self.lse[:, :, queries]
        mine.lerp_(out.to(mine.dtype), torch.sigmoid(lse - sums).unsqueeze(-1))
        sums.copy_(torch.logaddexp(sums, lse))


def _heads_first(x: Tensor) -> Tensor:
    """x_BSHK -> x_BHSK, and back."""
    return x.transpose(1, 2)
