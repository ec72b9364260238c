"""Owns ring attention: keys and values go from rank to rank around the ring while each attends to what it has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.core.mesh import Axis
from weft.errors import Fault, PlanError
from weft.parallel.context.documents import of_each_rank
from weft.parallel.context.pair import Pair
from weft.parallel.context.pieces import Attention

# Note [Two rings]
# Four ranks; at turn t rank i has the keys and values of rank i - t in hand, and passes them on while it computes:
#
#     turn            0     1     2     3                 what rank 0 has in hand: 0 3 2 1
#     keys, values    s  -> . ->  . ->  .                 c - 1 hops, forward and again backward
#     gradients             s  -> . ->  . -> s            c - 1 hops: they start one turn late, at the first rank that is
#                                                         not home, and are added at home to what home found itself
#
# So a forward sends (c-1) x 2(s/c) b kv entries a rank and a backward twice that (gradients of 16-bit types travel in
# float32: their sums are made on the way).


@dataclass(frozen=True)
class Ring:
    """The route of ring attention over one axis."""

    comm: Comm
    axis: Axis

    @property
    def index(self) -> int:
        """This rank's place."""
        return self.comm.index(self.axis)

    def pieces(self, own: Pair) -> Iterator[tuple[int, Pair]]:
        """Own keys and values, then those of the rank before, then of the one before that."""
        degree, piece = self.comm.degree(self.axis), own
        for turn in range(degree):
            hop = Hop(self, piece) if turn < degree - 1 else None
            yield (self.index - turn) % degree, piece
            if hop is not None:
                piece = hop.wait()

    def sum(self, own: Pair, dtype: torch.dtype) -> RingSum:
        """Gradients that follow the keys and values around the ring."""
        return RingSum(self, own, dtype)


class Hop:
    """A message to the next rank and one from the rank before, under way from now on.

    Of two ranks the next one is the one before: one exchange does for both messages, and does not wait until the other
    side is ready to receive.
    """

    def __init__(self, ring: Ring, pair: Pair) -> None:
        self.pair = pair
        self.works = _exchange(ring, pair) if ring.comm.degree(ring.axis) == 2 else _messages(ring, pair)

    def wait(self) -> Pair:
        """What came."""
        line = [work.wait() for work in self.works][-1]
        return self.pair.shaped(line)


def _exchange(ring: Ring, pair: Pair) -> tuple[Work, ...]:
    entries = pair.line.numel()
    sizes = (0, entries) if ring.index == 0 else (entries, 0)
    return (ring.comm.start_all_to_all(pair.line, ring.axis, send_sizes=sizes, recv_sizes=sizes),)


def _messages(ring: Ring, pair: Pair) -> tuple[Work, ...]:
    """Neighbours in opposite order: nothing deadlocks where both directions of a pair share one line without tags."""
    comm, axis, index, degree = ring.comm, ring.axis, ring.index, ring.comm.degree(ring.axis)

    def send() -> Work:
        return comm.start_send(pair.line, axis, to=(index + 1) % degree)

    def recv() -> Work:
        return comm.start_recv(torch.empty_like(pair.line), axis, source=(index - 1) % degree)

    if index % 2 == 0:
        return send(), recv()
    coming = recv()
    return send(), coming


class RingSum:
    """See Note [Two rings]."""

    def __init__(self, ring: Ring, own: Pair, dtype: torch.dtype) -> None:
        self.ring, self.home = ring, own.zeros(dtype)
        self.hop: Hop | None = None

    def add(self, source: int, columns: slice, dk: Tensor, dv: Tensor) -> None:
        """Add to what came with the piece, and send it on."""
        if source == self.ring.index:
            self.home.add(columns, dk, dv)
            return
        passing = self.hop.wait() if self.hop is not None else self.home.zeros(self.home.line.dtype)
        passing.add(columns, dk, dv)
        self.hop = Hop(self.ring, passing)

    def finish(self) -> Pair:
        """What the others found, when it has come home, and what was found here."""
        if self.hop is not None:
            self.home.line.add_(self.hop.wait().line)
        return self.home


def ring_attention(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGW: Tensor,
    comm: Comm,
    axis: Axis = "cp",
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention over sequences whose columns are cut over `axis`, exact; every rank of the axis calls it, and its backward.

    Keys and values travel around the ring while each rank attends to those in hand; only they travel, H / G times less than
    queries would. With c ranks, causal, rank i holds chunks i and 2c-1-i of the 2c equal chunks of each sequence
    (`weft.core.sequence.zigzag`), so that all have as much to do; not causal, any cut of equal parts will do.

    Args:
        q_BSHK: this rank's S columns, of B sequences, H heads of size K.
        k_BSGK, v_BSGW: this rank's keys and values, G heads that divide H; W may differ from K.
        comm: this rank's way to the others.
        causal: a token sees itself and those before it; else all.
        documents: documents_BS, whole numbers for this rank's columns: tokens see those of their own document only.
        scale: factor of q k^T; 1 / sqrt(K) where it is None.

    Returns:
        out_BSHW, this rank's columns, in the type of q. Sums over blocks are made in float32, in float64 for float64.

    Raises:
        PlanError: shapes that do not fit together, or an odd number of columns under `causal`.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers; Brandon et al. 2023, Striped Attention.
    """
    _check(q_BSHK, k_BSGK, v_BSGW, causal=causal, degree=comm.degree(axis))
    return Attention(
        Ring(comm, axis),
        scale=q_BSHK.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        documents=None if documents is None else of_each_rank(documents, comm, axis),
    )(q_BSHK, k_BSGK, v_BSGW)


def _check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, degree: int) -> None:
    shapes = ", ".join(f"{name}{list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not q.dim() == k.dim() == v.dim() == 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise PlanError(Fault("ring_attention", "columns differ", shapes, "q_BSHK, k_BSGK, v_BSGW of the same B and S"))
    if k.shape[2] != v.shape[2] or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3]:
        need = "as many heads in k as in v, a divisor of those in q; q and k of one head size"
        raise PlanError(Fault("ring_attention", "heads do not fit together", shapes, need))
    if causal and degree > 1 and q.shape[1] % 2:
        need = f"an even number of columns a rank: 2 of the {2 * degree} chunks of a sequence"
        raise PlanError(Fault("ring_attention", "an odd number of columns", shapes, need))
