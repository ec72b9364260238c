"""Blocks on whole sequences under context parallelism: their input is gathered, each rank keeps its columns of the output.

Note [Whole sequences under cp]
    A block that mixes tokens by code of its own (a recurrence, a convolution, a bias of its own
    attention), or that counts positions itself, is not accepted on the columns of a rank. If its
    class says that it may (`may_gather_sequence`), every rank computes it on whole sequences:

        x: own columns  -- all-gather -->  whole sequences  -- the block -->  whole  -- slice -->  own columns
        dx: own columns <-- slice x c --   whole, 1/c       <-- backward --   1/c    <-- all-gather --  dy

    All c ranks compute the same numbers as one device. The gradients of parameters are summed over
    cp, as those of every other block; so the gradient of the output is divided by c on its way in,
    and that of the input multiplied on its way out. Had each rank the gradient of its own columns
    alone, the parts could cancel each other, and a model that computes in float32 would round them.

    Memory and time of such a block are those of a mesh without cp; between blocks a rank holds its
    columns alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.models.common.attention import Attend, FusedAttention
from weft.models.common.batch import Batch
from weft.parallel.context.documents import in_rank_order, in_sequence_order, whole_documents_of

SEQ_DIM = 1


class WholeSequences:
    """The whole sequences of which the ranks of an axis hold columns. The last batch is gathered once
    for all blocks that read it.
    """

    def __init__(self, comm: Comm, axis: Axis) -> None:
        self.comm = comm
        self.axis = axis
        self.degree = comm.degree(axis)
        self._last: tuple[Batch, Batch] | None = None

    def gathered(self, x: Tensor) -> Tensor:
        """Own columns -> those of all ranks, in the order of the sequence."""
        by_rank = ops.gather_from_region(x, self.comm, self.axis, SEQ_DIM)
        return in_sequence_order(by_rank, self.degree)

    def columns(self, x: Tensor) -> Tensor:
        """This rank's columns of whole sequences that all ranks hold."""
        by_rank = in_rank_order(x, self.degree)
        return ops.scatter_to_region(by_rank, self.comm, self.axis, SEQ_DIM)

    def batch(self, own: Batch) -> Batch:
        """The batch of whole sequences."""
        if self._last is None or self._last[0] is not own:
            without_documents = replace(own, documents=None, whole_documents=None)
            whole = without_documents.map(lambda x: x if x.dim() == 1 else self.gathered(x))
            self._last = own, replace(whole, documents=whole_documents_of(own))
        return self._last[1]


def work_on_whole_sequences(block: nn.Module, sequences: WholeSequences) -> None:
    """Compute a block as Note [Whole sequences under cp] says."""
    for module in block.modules():
        if isinstance(module, Attend):
            module.implementation = FusedAttention()

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, batch = args
        if batch.is_never_sharded:
            return args
        whole = sequences.gathered(x)
        if x.is_floating_point():
            whole = join_gradient(whole, sequences.comm, sequences.axis)
        return whole, sequences.batch(batch)

    def split(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        if args[1].is_never_sharded:
            return out
        return sequences.columns(share_gradient(out, sequences.comm, sequences.axis))

    block.register_forward_pre_hook(gather, prepend=True)
    block.register_forward_hook(split)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def share_gradient(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """x, whose gradient is replicated; behind it each rank holds an equal share, and the sum is the
    gradient.
    """
    shared: Tensor = _ScaledGradient.apply(x, 1 / comm.degree(axis))  # type: ignore[no-untyped-call]
    return shared


def join_gradient(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """x, of whose gradient each rank holds an equal share; behind it the gradient is replicated."""
    joined: Tensor = _ScaledGradient.apply(x, comm.degree(axis))  # type: ignore[no-untyped-call]
    return joined
