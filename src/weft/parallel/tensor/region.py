"""Tensor-parallel regions: entry and exit, entries shared by linears, weight gradients under the input gradient's reduction.

Note [Region order]
    Autograd runs the ready node that was created last. An entry creates its nodes in this order,

        forward:   wait ── weight(q) ── weight(k) ── weight(v) ── enter ── linear q, k, v ── ...
        backward:  wait <── weight(q), weight(k), weight(v) <── enter <── linear v, k, q <── ...
                   dx             dW = dy^T x                   start     dx only
                                  ^^^^^^^^^^^ runs while the sum of dx over the axis is in flight

    so that the backward of every linear yields only its input gradient; `enter` starts the
    reduction of their sum; the weight gradients are computed by the `weight` nodes meanwhile;
    `wait` waits. The nodes pass placeholders without memory. Weight gradients still reach
    `.grad` through autograd's own accumulation, so hooks on parameters work.

    Compiled blocks have none of these nodes: their linears are torch's own, and the reduction is waited
    for where it starts.

    A backward that is differentiated again (`create_graph`) defers nothing: then `linear` yields the
    weight gradients, and the reduction is one that autograd differentiates.

    Under a split backward (Note [Split backward]) weight gradients come later still: there are no
    `weight` nodes then, and the linears are torch's own, which a split backward can take apart.

Note [Shared entries]
    A linear enters a region at its input tensor. Linears that read the same tensor object in one
    forward of a block share one entry: one all-gather or none forward, one reduction backward. The
    first of them opens the entry for all that the sharding trace saw reading that tensor; an entry
    is dropped when all have read it, and at the latest when the block's forward ends, also by an
    exception (recomputation stops a forward early). A linear that finds no entry opens one of its
    own, so a forward that differs from the trace costs time, not correctness.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.core.mesh import Axis
from weft.models.common.linear_products import LinearProduct, rows
from weft.parallel.autograd.rank_part import plain
from weft.parallel.autograd.split_backward import active_split_backward
from weft.parallel.tensor import chunked_products
from weft.parallel.tensor.autocast import autocast

SEQ_DIM = 1
"""Dim of the sequence in x_BSD."""


@dataclass
class AsyncInputGrad:
    """The reduction of an entry's input gradient, from its start in `enter` to `wait`."""

    work: Work | None = None


@dataclass
class DeferredWeight:
    """A linear's weight in one forward, and the (dy, x) pairs that its gradient is computed from
    later.

    Attributes:
        is_deferred: whether it is; else autograd computes the gradient with that of the input.
        multiplied: the x whose product was computed while it was gathered; see Note [Products in
            chunks].
        output: that product.
    """

    weight: Tensor
    is_deferred: bool = False
    multiplied: Tensor | None = None
    output: Tensor | None = None
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    """A tensor-parallel region: its axis, and whether activations outside are sharded along the
    sequence, which is dim `dim`.

    Attributes:
        overlaps: whether weight gradients are computed while the gradient of the input is reduced; in
            blocks that are compiled they are not.
        in_chunks: whether parts of the sequence are sent while others are multiplied; see Note
            [Products in chunks].
    """

    comm: Comm
    axis: Axis
    sequence_parallel: bool
    dim: int = SEQ_DIM
    overlaps: bool = True
    in_chunks: bool = False

    def enter(
        self, x: Tensor, weights: Sequence[Tensor], *, multiplied: Collection[int] = ()
    ) -> tuple[Tensor, tuple[DeferredWeight, ...]]:
        """The whole x for every rank, and the weights to be used on it.

        Args:
            multiplied: places of the weights whose product with x is needed.

        With sequence parallelism x_BSD holds this rank's part of the sequence and is all-gathered;
        its gradient is reduce-scattered. Otherwise x stays as it is and its gradient is
        all-reduced.
        """
        x = autocast(x)
        if not self.overlaps or torch.compiler.is_dynamo_compiling():
            return self._entered(x), tuple(DeferredWeight(weight) for weight in weights)
        grad = AsyncInputGrad()
        # The order of these nodes decides what overlaps in the backward: see Note [Region order].
        x = _Wait.apply(x, grad)  # type: ignore[no-untyped-call]
        deferred = tuple(DeferredWeight(autocast(weight)) for weight in weights)
        if active_split_backward() is None:
            for one in deferred:
                one.weight = _Weight.apply(one.weight, one)  # type: ignore[no-untyped-call]
                one.is_deferred = True
        at_once = [deferred[place] for place in multiplied] if self.takes_chunks(x) else []
        entered: Tensor = _Enter.apply(x, grad, self, at_once)  # type: ignore[no-untyped-call]
        for one in at_once:
            one.multiplied = entered
        return entered, deferred

    def takes_chunks(self, x: Tensor) -> bool:
        """Whether products with x, or its gradient, are computed in chunks."""
        if not (self.in_chunks and self.sequence_parallel and self.dim == SEQ_DIM):
            return False
        return x.dim() == 3 and active_split_backward() is None

    def _entered(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return ops.copy_to_region(x, self.comm, self.axis)
        return ops.all_gather(x, self.comm, self.axis, self.dim)

    def leave(self, y: Tensor) -> Tensor:
        """The sum of y over the ranks; with sequence parallelism each keeps its part of the
        sequence.
        """
        if not self.sequence_parallel:
            return ops.reduce_from_region(y, self.comm, self.axis)
        return ops.reduce_scatter(y, self.comm, self.axis, dim=self.dim)

    def largest(self, magnitudes: Tensor) -> Tensor:
        """The largest of each over the ranks that share the rows which these are of."""
        return self.comm.all_reduce(magnitudes, self.axis, op="max")


class HasWeight(Protocol):
    """A linear, as far as an entry needs to know it.

    Attributes:
        readers: the linears that read the same tensor, where it is the first of them; else none.
    """

    weight: nn.Parameter
    readers: tuple[HasWeight, ...]


@dataclass(eq=False)
class _Entry:
    """An entry, and the linears that have yet to read it."""

    x: Tensor
    entered: Tensor
    weights: list[tuple[HasWeight, DeferredWeight]]

    def take(self, linear: HasWeight) -> DeferredWeight | None:
        """The weight of a linear that reads now; None: it has none here."""
        for place, (reader, weight) in enumerate(self.weights):
            if reader is linear:
                del self.weights[place]
                return weight
        return None


class SharedEntries:
    """The open entries of one block's forward; see Note [Shared entries]."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._open: list[_Entry] = []

    def read(
        self, x: Tensor, linear: HasWeight, *, multiplies: bool = False
    ) -> tuple[Tensor, DeferredWeight]:
        """The region's input for this linear, and its weight.

        Args:
            multiplies: whether it multiplies them, and all readers do.
        """
        for place, entry in enumerate(self._open):
            weight = entry.take(linear) if entry.x is x else None
            if weight is not None:
                if not entry.weights:
                    del self._open[place]
                return entry.entered, weight
        readers = linear.readers or (linear,)
        multiplied = range(len(readers)) if multiplies else ()
        entered, weights = self.region.enter(
            x, [plain(reader.weight) for reader in readers], multiplied=multiplied
        )
        entry = _Entry(x, entered, list(zip(readers, weights, strict=True)))
        weight = entry.take(linear)
        assert weight is not None, "a linear is one of its readers"
        if entry.weights:
            self._open.append(entry)
        return entered, weight

    def clear(self) -> None:
        """Drop all entries: the forward that they belong to is over."""
        self._open.clear()


def linear(
    x: Tensor, deferred: DeferredWeight, bias: Tensor | None, product: LinearProduct
) -> Tensor:
    """x W^T + b whose weight gradient is computed later; see Note [Region order]."""
    weight = deferred.weight
    if torch.compiler.is_dynamo_compiling() or not deferred.is_deferred:
        return product(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, deferred, product)  # type: ignore[no-untyped-call]
    return y


def _placeholder(like: Tensor, shape: torch.Size) -> Tensor:
    """A gradient-shaped tensor without memory."""
    return like.new_zeros(()).expand(shape)


def _is_placeholder(gradient: Tensor) -> bool:
    return not any(gradient.stride())


class _Wait(torch.autograd.Function):
    """Identity; backward: the reduced input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: AsyncInputGrad) -> Tensor:
        ctx.grad = grad
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        work = ctx.grad.work
        assert work is not None, "autograd ran a region's wait node before its enter node"
        return work.wait(), None


class _Enter(torch.autograd.Function):
    """The region's input; backward: starts the reduction of its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        grad: AsyncInputGrad,
        region: Region,
        multiplied: Sequence[DeferredWeight],
    ) -> Tensor:
        ctx.grad = grad
        ctx.region = region
        ctx.shape = x.shape
        if multiplied:
            matrices = [one.weight.t() for one in multiplied]
            whole, outputs = chunked_products.gathered_products(
                x, matrices, region.comm, region.axis
            )
            for one, output in zip(multiplied, outputs, strict=True):
                one.output = output
            return whole
        if region.sequence_parallel:
            return region.comm.all_gather(x, region.axis, dim=region.dim)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        region: Region = ctx.region
        comm = region.comm
        if torch.is_grad_enabled():  # a graph of this backward is recorded: no work in flight
            work = Work.done(region.leave(dx))
        elif region.sequence_parallel:
            work = comm.start_reduce_scatter(dx, region.axis, dim=region.dim)
        else:
            work = comm.start_all_reduce(dx, region.axis)
        ctx.grad.work = work  # `_Wait` yields its result; what flows there from here has no memory
        placeholder = _placeholder(dx, ctx.shape)
        return placeholder, None, None, None


class _Weight(torch.autograd.Function):
    """Identity of a weight; backward: its gradient, from the pairs that the linears have left, and
    what arrives besides placeholders.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, deferred: DeferredWeight) -> Tensor:
        ctx.deferred = deferred
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None]:
        pairs = ctx.deferred.pairs
        if not pairs:
            return arrived, None
        dy_t, x = _as_matrices(pairs.pop())
        gradient = torch.mm(dy_t, x)
        while pairs:
            dy_t, x = _as_matrices(pairs.pop())
            gradient.addmm_(dy_t, x)
        if not _is_placeholder(arrived):
            gradient.add_(arrived)
        return gradient, None


def _as_matrices(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(dy, x) as dy^T[out, N] and x[N, in], whose product is the weight's gradient."""
    dy, x = pair
    return rows(dy).t(), rows(x)


class _Linear(torch.autograd.Function):
    """x W^T + b; backward: the gradients of x and b, and a (dy, x) pair for that of W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deferred: DeferredWeight,
        product: LinearProduct,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        ctx.product = product
        if deferred.output is not None and deferred.multiplied is x:
            y = deferred.output if bias is None else deferred.output.add_(bias)
        else:
            y = product.output(x, weight, bias)
        deferred.multiplied = deferred.output = None
        # no view in the eyes of autograd: the caller may change it in place, as with nn.Linear
        unviewed: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return unviewed

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = None
        d_weight = None
        d_bias = None
        if needs_x:
            dx = ctx.product.input_gradient(dy, weight)
        if needs_weight and torch.is_grad_enabled():
            dy_t, x_rows = _as_matrices((dy, x))
            d_weight = torch.mm(dy_t, x_rows)
        elif needs_weight:
            pairs = ctx.deferred.pairs
            pairs.append((dy, x))
            d_weight = _placeholder(dy, weight.shape)
        if needs_bias:
            d_bias = rows(dy).sum(0)
        return dx, d_weight, d_bias, None, None
