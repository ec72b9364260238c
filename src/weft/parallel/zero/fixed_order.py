"""Sums in a fixed binary tree over the micro-batches of a step, whatever the number of data ranks: `deterministic = true`.

Micro-batch p of a step is leaf p. With D data ranks of M micro-batches each, the same tree is
computed in two ways, chosen by when gradients are reduced; p counts the micro-batches of one rank
first (ZeRO 0, 1: once a step), or the ranks (ZeRO 2, 3: every backward):

    p = d M + m    rank d adds the tree over its m, then the tree over ranks is added      0 1 | 2 3
    p = m D + d    the tree over ranks of each m is added, then that over m                0 2 | 1 3

Both are the tree whose node (level, i) is the sum of (level - 1, 2 i) and (level - 1, 2 i + 1), if
D and M are powers of two. Ranks along other axes are added last where ranks are, or first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.core.axes import span_sizes
from weft.core.dimension import plain_data_axes


@dataclass(frozen=True)
class Leaf:
    """A micro-batch of a stage."""

    stage: int
    microbatch: int


class TreeNode(NamedTuple):
    """A node of the tree of one stage: leaves are at level 0, the nodes of a level are counted."""

    stage: int
    level: int
    place: int

    @property
    def sibling(self) -> TreeNode:
        """The other child of the same parent."""
        return self._replace(place=self.place ^ 1)

    @property
    def parent(self) -> TreeNode:
        """The node one level up."""
        return TreeNode(self.stage, self.level + 1, self.place // 2)


@dataclass
class TreeSum:
    """A sum of tensors in a binary tree over micro-batches, whatever order they arrive in.

    Nodes are added as soon as both are there: of M leaves that come in order at most log2(M) + 1
    sums are held. A leaf that never comes counts as zero.

    Attributes:
        nodes: (stage, level, index) -> sum of the leaves below.
    """

    nodes: dict[TreeNode, Tensor] = field(default_factory=dict)

    def add(self, leaf: Leaf, x: Tensor) -> None:
        """Add a leaf; x is changed."""
        node = TreeNode(leaf.stage, 0, leaf.microbatch)
        self._add(node, x)

    def _add(self, node: TreeNode, x: Tensor) -> None:
        earlier = self.nodes.get(node)
        if earlier is not None:  # a second gradient of one micro-batch
            earlier.add_(x)
            return
        sibling = self.nodes.pop(node.sibling, None)
        # a + b has the bits of b + a, so whichever of the two came first is the one that is added to.
        if sibling is None:
            self.nodes[node] = x
        else:
            self._add(node.parent, sibling.add_(x))

    def take(self) -> Tensor | None:
        """The sum of all leaves, and of stages in their order; None without leaves."""
        total: Tensor | None = None
        for stage_sum in self.take_stages():
            total = stage_sum if total is None else total.add_(stage_sum)
        return total

    def take_stages(self) -> list[Tensor]:
        """The sum of the leaves of each stage, in the order of stages."""
        stages = sorted({node.stage for node in self.nodes})
        sums = [self._take_stage(stage) for stage in stages]
        self.nodes.clear()
        return sums

    def _take_stage(self, stage: int) -> Tensor:
        """The root: a node without a sibling is that of the level above."""
        level = 0
        while True:
            nodes = sorted(node for node in self.nodes if node.stage == stage)
            if len(nodes) == 1:
                root = nodes[0]
                return self.nodes[root]
            for node in nodes:
                if node.level == level:
                    x = self.nodes.pop(node)
                    self._add(node.parent, x)
            level += 1


def tree_sum(rows: Tensor, dim: int) -> Tensor:
    """The sum along a dim in a binary tree: neighbours first."""
    while rows.shape[dim] > 1:
        length = rows.shape[dim]
        even_length = length - length % 2
        paired = rows.narrow(dim, 0, even_length)
        pairs = paired.unflatten(dim, (-1, 2))
        left = pairs.select(dim + 1, 0)
        right = pairs.select(dim + 1, 1)
        sums = left + right
        if even_length < length:
            last = rows.narrow(dim, length - 1, 1)
            sums = torch.cat((sums, last), dim)
        rows = sums
    return rows.squeeze(dim)


class FixedOrderSum:
    """The sum of every rank's flat tensor, in a tree over ranks, under way: an all-to-all of shards,
    which each rank adds; and an all-gather where every rank needs the whole sum.

    Where shards have copies, each rank adds what comes before the axis of copies, the ranks of that
    axis exchange equal parts of these sums by a second all-to-all, add, and all-gather them.

    Args:
        flat: of this rank.
        axes: mesh axes whose ranks are added.
        replicate_axes: further ones, along which shards are copies.
        is_sharded: whether this rank needs its equal shard over `axes` alone.
        data_first: whether the data axes are added before the other axes.
    """

    def __init__(
        self,
        comm: Comm,
        flat: Tensor,
        axes: tuple[str, ...],
        replicate_axes: tuple[str, ...] = (),
        *,
        is_sharded: bool,
        data_first: bool,
    ) -> None:
        self.comm = comm
        self.axes = tuple(name for name in comm.mesh.wide_axes if name in axes)
        self.replicate_axes = tuple(name for name in comm.mesh.wide_axes if name in replicate_axes)
        self.is_sharded = is_sharded
        self.data_first = data_first
        self.sizes = span_sizes(flat.numel(), comm.degree(axes))
        own_size = self.sizes[comm.index(axes)]
        self._started: Work = comm.start_all_to_all(
            flat, axes, send_sizes=self.sizes, recv_sizes=(own_size,) * len(self.sizes)
        )
        self._partial: _PartialSum | None = None
        self._replica_sum: FixedOrderSum | None = None

    def is_completed(self) -> bool:
        """Whether what the other ranks send has arrived."""
        return self._started.is_completed()

    def start_replica_sum(self) -> None:
        """Start the exchange with the ranks that have copies, once that of shards has ended."""
        if self._partial is not None:  # started before
            return
        received = self._started.wait()
        degrees = [self.comm.degree(name) for name in self.axes]
        self._partial = _PartialSum(received.view(*degrees, -1), self.axes)
        if not self.replicate_axes:
            return
        self._partial.add(self._axes_in_order(before_replicas=True))
        self._replica_sum = FixedOrderSum(
            self.comm,
            self._partial.rows.reshape(-1),
            self.replicate_axes,
            is_sharded=False,
            data_first=self.data_first,
        )

    def wait(self) -> Tensor:
        """The sum, in new memory: this rank's shard, or the whole."""
        self.start_replica_sum()
        partial = self._partial
        assert partial is not None, "set when the exchange of shards has ended"
        if self._replica_sum is not None:
            partial.rows = self._replica_sum.wait().view(partial.rows.shape)
        partial.add(self._axes_in_order(before_replicas=False))
        if self.is_sharded:
            return partial.rows
        return self.comm.all_gather(partial.rows, self.axes, sizes=self.sizes)

    def _axes_in_order(self, *, before_replicas: bool) -> tuple[str, ...]:
        """Those of `axes` that are added before, or after, the axes of copies; innermost first."""
        every_axis = (*self.axes, *self.replicate_axes)
        inner_first = [name for name in reversed(self.comm.mesh.wide_axes) if name in every_axis]
        data = [name for name in inner_first if name in plain_data_axes()]
        others = [name for name in inner_first if name not in data]
        order = [*data, *others] if self.data_first else [*others, *data]
        places = [place for place, name in enumerate(order) if name in self.replicate_axes]
        first_after = min(places, default=0)
        order = order[:first_after] if before_replicas else order[first_after:]
        return tuple(name for name in order if name in self.axes)


class _PartialSum:
    """Terms of a sum over mesh axes, some of which have been added.

    Attributes:
        rows: with a dim for each of `remaining`, and one of entries.
        remaining: axes that are not added yet.
    """

    def __init__(self, rows: Tensor, remaining: Sequence[str]) -> None:
        self.rows = rows
        self.remaining = list(remaining)

    def add(self, axes: Sequence[str]) -> None:
        """Add along these axes, one after the other."""
        for name in axes:
            dim = self.remaining.index(name)
            self.rows = tree_sum(self.rows, dim)
            self.remaining.remove(name)


class StageSums:
    """The sums over ranks of the gradients of several stages of this rank, which are added last: the
    tree over the micro-batches of one stage goes on over the ranks.
    """

    def __init__(self, sums: Sequence[Work | FixedOrderSum]) -> None:
        self._sums = sums

    def start_replica_sum(self) -> None:
        """Start the exchanges with the ranks that have copies."""
        for stage_sum in self._sums:
            if not isinstance(stage_sum, Work):
                stage_sum.start_replica_sum()

    def is_completed(self) -> bool:
        """Whether what the other ranks send has arrived."""
        return all(stage_sum.is_completed() for stage_sum in self._sums)

    def wait(self) -> Tensor:
        """The sum over the stages, in the memory of that of the first."""
        first, *others = [stage_sum.wait() for stage_sum in self._sums]
        for stage_sum in others:
            first.add_(stage_sum)
        return first


SUM_BITS = 30
"""Bits of each of the two whole numbers that a number is split into."""


def exact_sum(
    comm: Comm, tensors: Sequence[Tensor], term: Callable[[Tensor], Tensor] = Tensor.double
) -> Tensor:
    """The sum of the numbers of all ranks of the mesh, float64 scalar: the same bits in whatever
    order, and on however many ranks, the numbers are; every rank must call it.

    Each number is rounded to 60 bits below the largest one of all, as two whole numbers, whose
    sums are exact. Source: the idea of Demmel and Nguyen 2013, "Fast Reproducible Floating-Point
    Summation", with whole numbers in place of bins.

    Args:
        term: from one of the tensors to the numbers that are added, float64; called twice.
    """
    return _exact_sums(comm, tensors, lambda tensor: term(tensor).reshape(-1, 1), 1).squeeze(0)


def exact_sums(comm: Comm, rows: Sequence[Tensor], *, num_columns: int) -> Tensor:
    """As `exact_sum` for each column of these rows: [columns]."""
    return _exact_sums(comm, rows, lambda row: row.double().unsqueeze(0), num_columns)


def _exact_sums(
    comm: Comm, tensors: Sequence[Tensor], term: Callable[[Tensor], Tensor], num_columns: int
) -> Tensor:
    """The sum of each column, where `term` gives a table of numbers for each tensor."""
    largest = torch.zeros(num_columns, dtype=torch.float64, device=comm.device)
    for tensor in tensors:
        if tensor.numel():
            own_largest = term(tensor).abs().amax(0)
            largest = torch.maximum(largest, own_largest)
    largest = comm.combine_world(largest, lambda rows: rows.amax(0))
    unit = _unit_of(largest)
    # Each of the two whole numbers is at most 2^SUM_BITS, so int64 holds sums of 2^33 of them exactly.
    parts = torch.zeros(2 * num_columns, dtype=torch.int64, device=comm.device)
    for tensor in tensors:
        parts += _sums_of_parts(term(tensor), unit)
    high_sums, low_sums = comm.sum_world(parts).double().chunk(2)
    totals = (high_sums + low_sums / 2**SUM_BITS) * unit
    return torch.where(largest.isfinite(), totals, largest)


def _unit_of(largest: Tensor) -> Tensor:
    """The power of two that the largest number is about 2^SUM_BITS times as large as."""
    _, exponent = torch.frexp(largest)
    one = torch.ones_like(largest)
    return torch.ldexp(one, exponent - SUM_BITS)


def _sums_of_parts(numbers: Tensor, unit: Tensor) -> Tensor:
    """The sums of the two whole numbers that each number of a column is split into, int64: of the
    higher ones of all columns, then of the lower ones.
    """
    scaled = numbers / unit
    high = scaled.trunc()
    rest = (scaled - high) * 2**SUM_BITS
    low = rest.round()
    return torch.cat((high.sum(0, dtype=torch.int64), low.sum(0, dtype=torch.int64)))
