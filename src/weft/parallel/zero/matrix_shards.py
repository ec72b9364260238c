"""Logical matrices whose entries are spread over ranks: which rank holds which entries, the exchange.

A parameter's entries are spread over the mesh axes that shard it (tp, ep) and those over which ZeRO
shards it further; along every other axis ranks hold copies, and compute the same.

    every rank    direction of its entries ──┐  all-to-all                ┌─> its entries of the result
    owner of one matrix                      └─> matrix ─> transform ─────┘  all-to-all

The owner of a matrix is the rank that holds most of it: what it holds is not sent. Of several such
ranks it is the one with the least work so far. A matrix that one rank holds is not sent at all.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.core.shard import Shard, shard_of
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.zero.flat_params import FlatLayout
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_entries import ParamEntries, Shape
from weft.parallel.zero.param_group import ParamGroup


def param_entries(model: ParallelModel, reducer: GradientReducer) -> dict[str, ParamEntries]:
    """Where the entries of every trained parameter of this rank's stages are, also of those that it
    holds none of.
    """
    found: dict[str, ParamEntries] = {}
    for group in reducer.trained_groups:
        held_by = _held_by(model, group)
        for place, span in enumerate(group.layout.spans):
            found[span.name] = _entries_of(model, group, place, held_by)
    return found


@dataclass(frozen=True)
class _HeldByRank:
    """The shards of a group's parameters on one rank, and their layout in its flat memory."""

    shards: tuple[Shard, ...]
    layout: FlatLayout


def _held_by(model: ParallelModel, group: ParamGroup) -> Callable[[int], _HeldByRank]:
    """What each rank holds of a group: where tp divides unevenly, ranks have shards of other sizes,
    which ZeRO cuts at other entries.
    """
    plan = model.plan
    params = [model.shards[span.name] for span in group.layout.spans]

    @cache
    def held_by(rank: int) -> _HeldByRank:
        shards = tuple(
            shard_of(
                param.name,
                param.shape,
                param.logical,
                rule=plan.sharding_rule,
                mesh=plan.mesh,
                rank=rank,
            )
            for param in params
        )
        sizes = {param.name: (shard.size,) for param, shard in zip(params, shards, strict=True)}
        return _HeldByRank(shards, group.layout_of(sizes))

    return held_by


def _entries_of(
    model: ParallelModel, group: ParamGroup, place: int, held_by: Callable[[int], _HeldByRank]
) -> ParamEntries:
    comm = model.comm
    mesh = comm.mesh
    param = model.shards[group.layout.spans[place].name]
    group_axes = group.axes if group.policy.zero else ()
    spread_over = {*param.shard_axes, *group_axes}
    axes = tuple(name for name in mesh.wide_axes if name in spread_over)
    ranks = comm.group(axes)

    def boxes_at(index: int) -> tuple[Box, ...]:
        rank = ranks[index]
        held = held_by(rank)
        entries = held.layout.overlap(
            held.layout.spans[place], mesh.index(rank, group_axes)
        ).in_param
        return held.shards[place].boxes_of_range(entries.start, entries.stop)

    return ParamEntries(
        shape=param.shape,
        logical=param.logical,
        axes=axes,
        index=comm.index(axes),
        boxes_at=boxes_at,
        num_holders=len(ranks),
    )


@dataclass(frozen=True)
class MatrixPiece:
    """Entries of a logical matrix that one rank holds.

    Attributes:
        holder: rank along the exchange's axes.
        piece_shape: their shape.
        in_matrix: their place in the matrix's box.
        start: where the box that contains them begins in the holder's flattened tensor.
        box_shape: shape of that box.
        in_box: their place in it.
    """

    holder: int
    piece_shape: Shape
    in_matrix: tuple[slice, ...]
    start: int
    box_shape: Shape
    in_box: tuple[slice, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.piece_shape)

    def view(self, x: Tensor) -> Tensor:
        """The entries in the holder's tensor."""
        flat = x.view(-1)
        stop = self.start + math.prod(self.box_shape)
        box = flat[self.start : stop].view(self.box_shape)
        return box[self.in_box]


@dataclass(frozen=True)
class LogicalMatrix:
    """A matrix, its pieces in the order of their holders, and the rank that transforms it."""

    name: str
    box: Box
    pieces: tuple[MatrixPiece, ...]
    owner: int

    @property
    def shape(self) -> tuple[int, int]:
        """[A, B]."""
        *_, rows, columns = self.box.shape
        return rows, columns


def _pieces(entries: ParamEntries, matrix: Box, holders: int) -> tuple[MatrixPiece, ...]:
    found: list[MatrixPiece] = []
    for holder in range(holders):
        start = 0
        for box in entries.boxes_at(holder):
            common = box & matrix
            if common.size:
                piece = MatrixPiece(
                    holder,
                    piece_shape=common.shape,
                    in_matrix=common.within(matrix),
                    start=start,
                    box_shape=box.shape,
                    in_box=common.within(box),
                )
                found.append(piece)
            start += box.size
    return tuple(found)


def _assign(
    params: Mapping[str, ParamEntries], holders: int, *, splits_stacked: bool
) -> tuple[LogicalMatrix, ...]:
    """All matrices of these parameters with their owners, the same on every rank: the rank that
    holds most of a matrix, then the one with the least work so far.
    """
    work = [0] * holders
    found: list[LogicalMatrix] = []
    for name, entries in params.items():
        for box in entries.matrices(splits_stacked=splits_stacked):
            pieces = _pieces(entries, box, holders)
            held: Counter[int] = Counter()
            for piece in pieces:
                held[piece.holder] += piece.size
            # Every rank computes this for itself: it may depend on nothing but what all of them know.
            preference = [(-held[rank], work[rank], rank) for rank in range(holders)]
            _, _, owner = min(preference)
            shorter_side = min(box.shape[-2:])
            work[owner] += box.size * shorter_side
            matrix = LogicalMatrix(name, box, pieces, owner)
            found.append(matrix)
    return tuple(found)


@dataclass(frozen=True)
class HeldPiece:
    """A piece and its matrix."""

    matrix: LogicalMatrix
    piece: MatrixPiece


@dataclass(frozen=True)
class TransformedPiece:
    """Entries of a transformed matrix that this rank holds, in the shape of the piece."""

    matrix: LogicalMatrix
    piece: MatrixPiece
    values: Tensor


class MatrixExchange:
    """Transforms logical matrices whose entries are spread over the ranks along some mesh axes.

    Args:
        params: parameters whose entries are spread over the same axes.
        comm: None on one device.

    Attributes:
        names: of the parameters.
        own_matrices: those that this rank transforms.
        given: rank along the axes -> this rank's pieces of the matrices that it owns.
        taken: rank along the axes -> its pieces of this rank's matrices.
        is_local: whether every matrix lies on one rank; the same on all ranks.
    """

    def __init__(
        self, params: Mapping[str, ParamEntries], comm: Comm | None, *, splits_stacked: bool
    ) -> None:
        first = next(iter(params.values()))
        self.names = tuple(params)
        self.axes = first.axes
        self.index = first.index
        self.comm = comm
        num_ranks = 1 if comm is None else comm.degree(self.axes)
        matrices = _assign(params, num_ranks, splits_stacked=splits_stacked)
        self.own_matrices = tuple(each for each in matrices if each.owner == self.index)
        self.given: list[list[HeldPiece]] = [[] for _ in range(num_ranks)]
        self.taken: list[list[HeldPiece]] = [[] for _ in range(num_ranks)]
        self.is_local = True
        for matrix in matrices:
            for piece in matrix.pieces:
                held = HeldPiece(matrix, piece)
                if piece.holder == self.index:
                    self.given[matrix.owner].append(held)
                if matrix.owner == self.index:
                    self.taken[piece.holder].append(held)
                if piece.holder != matrix.owner:
                    self.is_local = False

    def sent_bytes(self, itemsize: int) -> int:
        """What this rank sends in one step: pieces to owners, and results of its own matrices."""
        num_entries = 0
        for rank in range(len(self.given)):
            if rank != self.index:
                num_entries += _num_entries(self.given[rank])
                num_entries += _num_entries(self.taken[rank])
        return num_entries * itemsize

    def run(
        self,
        directions: Mapping[str, Tensor],
        transform: Callable[[Tensor], Tensor],
        *,
        like: Tensor,
    ) -> Iterator[TransformedPiece]:
        """Every piece of this rank with its transformed values; a collective over the axes.

        Args:
            directions: by parameter, of every parameter that this rank holds entries of.
            like: a tensor of the dtype and device of directions.
        """
        parts = [like.new_zeros(0)]
        for held in itertools.chain(*self.given):
            direction = directions[held.matrix.name]
            entries = held.piece.view(direction)
            parts.append(entries.reshape(-1))
        received = self._exchange(torch.cat(parts), self.given, self.taken)
        results = self._transform(received, transform)
        returned = self._exchange(results, self.taken, self.given)
        start = 0
        for held in itertools.chain(*self.given):
            stop = start + held.piece.size
            values = returned[start:stop].view(held.piece.piece_shape)
            yield TransformedPiece(held.matrix, held.piece, values)
            start = stop

    def _transform(self, received: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        """Results of this rank's matrices, cut and ordered as the directions came."""
        taken = list(itertools.chain(*self.taken))
        gathered: dict[int, Tensor] = {}
        for matrix in self.own_matrices:
            gathered[id(matrix)] = received.new_empty(matrix.box.shape)
        start = 0
        for held in taken:
            piece = held.piece
            stop = start + piece.size
            entries = received[start:stop].view(piece.piece_shape)
            gathered[id(held.matrix)][piece.in_matrix] = entries
            start = stop
        results: dict[int, Tensor] = {}
        for matrix in self.own_matrices:
            direction = gathered.pop(id(matrix)).view(matrix.shape)
            result = transform(direction).to(received.dtype)
            results[id(matrix)] = result.reshape(matrix.box.shape)
        parts = [received.new_zeros(0)]
        for held in taken:
            result = results[id(held.matrix)]
            entries = result[held.piece.in_matrix]
            parts.append(entries.reshape(-1))
        return torch.cat(parts)

    def _exchange(
        self,
        flat: Tensor,
        sent: Sequence[Sequence[HeldPiece]],
        received: Sequence[Sequence[HeldPiece]],
    ) -> Tensor:
        """Send entries in the order of `sent`; what arrives is in the order of `received`."""
        if self.comm is None or self.is_local:
            return flat
        return self.comm.all_to_all(
            flat,
            self.axes,
            send_sizes=[_num_entries(pieces) for pieces in sent],
            recv_sizes=[_num_entries(pieces) for pieces in received],
        )


def _num_entries(pieces: Sequence[HeldPiece]) -> int:
    return sum(held.piece.size for held in pieces)
