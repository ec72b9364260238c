"""Lowering of collectives: tensors and arguments in, a flat `Call` and the function that makes the result out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from weft.comm.group import Group
from weft.comm.signature import signature_text
from weft.comm.transport import Call, Op, Reduce
from weft.errors import CommError


def split_sizes(
    length: int, num_pieces: int, sizes: Sequence[int] | None, *, what: str
) -> tuple[int, ...]:
    """`sizes`, checked to split `length` into `num_pieces`; None splits into equal pieces.

    Raises:
        CommError: they do not; the message begins with `what`, which names the operation, the axis
            and the dimension.
    """
    if sizes is None:
        piece_length, remainder = divmod(length, num_pieces)
        if remainder:
            raise CommError(
                f"{what} has {length} entries, not divisible by {num_pieces}; pass sizes"
            )
        return (piece_length,) * num_pieces
    total = sum(sizes)
    if total != length:
        raise CommError(f"{what} has {length} entries, sizes {list(sizes)} add up to {total}")
    return member_sizes(sizes, num_pieces, what=what)


def member_sizes(sizes: Sequence[int], num_members: int, *, what: str) -> tuple[int, ...]:
    """`sizes`, checked to hold one length >= 0 for each of `num_members`.

    Raises:
        CommError: they do not.
    """
    is_one_per_member = len(sizes) == num_members
    if not is_one_per_member or min(sizes) < 0:
        need = f"{num_members} lengths, one per member, none negative"
        raise CommError(f"{what}: sizes {list(sizes)} must be {need}")
    return tuple(sizes)


def flatten(x: Tensor) -> Tensor:
    """`x` as one contiguous dimension, without autograd; shares memory with `x` if `x` is
    contiguous.
    """
    return x.detach().contiguous().view(-1)


def with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """`shape` with the length of dimension `dim` replaced."""
    lengths = list(shape)
    lengths[dim] = length
    return tuple(lengths)


def piece_numels(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Number of elements of each piece when `shape` is split along `dim` into `sizes`."""
    numel_per_entry = math.prod(with_length(shape, dim, 1))
    return tuple(size * numel_per_entry for size in sizes)


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The pieces of `x` along `dim`, one after the other in a flat buffer."""
    if dim == 0:
        return flatten(x)
    return concatenated([piece.reshape(-1) for piece in torch.split(x.detach(), list(sizes), dim)])


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]], dim: int) -> Tensor:
    """Inverse of `pack`: pieces of `shapes`, one after the other in `buffer`, concatenated along
    `dim`.
    """
    if dim == 0:
        num_rows = sum(shape[0] for shape in shapes)
        whole_shape = with_length(shapes[0], 0, num_rows)
        return buffer.view(whole_shape)
    flat_pieces = torch.split(buffer, [math.prod(shape) for shape in shapes])
    pieces = [piece.view(*shape) for piece, shape in zip(flat_pieces, shapes, strict=True)]
    return concatenated(pieces, dim)


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one dtype, joined along `dim`, also within `torch.autocast` of another 16-bit dtype, which
    would reject them.
    """
    first = tensors[0]
    device = first.device.type
    may_be_cast = first.dtype in (torch.float16, torch.bfloat16) and not first.is_meta
    if not may_be_cast or not torch.is_autocast_enabled(device):
        return torch.cat(list(tensors), dim)
    with torch.autocast(device, enabled=False):
        return torch.cat(list(tensors), dim)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoweredOp(Generic[T]):
    """A call of a group, or of none if it is a message; `finish` makes the result once the call is
    complete. In a group of one member there is no call.
    """

    group: Group | None
    call: Call | None
    finish: Callable[[], T]


def all_reduce(x: Tensor, group: Group, op: Reduce) -> LoweredOp[Tensor]:
    """The reduction of every member's x, in new memory."""
    return all_reduce_(x.detach().clone(memory_format=torch.contiguous_format), group, op)


def all_reduce_(x: Tensor, group: Group, op: Reduce) -> LoweredOp[Tensor]:
    """The reduction of every member's x, in place."""
    if op == "avg":
        _check_average(x)
    if len(group.ranks) == 1:
        return LoweredOp(group, None, lambda: x)
    # of a tensor that is not contiguous a copy, which `_copy_back` writes into it
    output = x.detach().contiguous().view(-1)
    signature = signature_text(f"all_reduce({op})", x.dtype, x.shape)
    call = _call(group, "all_reduce", signature, output=output, reduce=op)
    return LoweredOp(group, call, partial(_copy_back, x, output))


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> LoweredOp[Tensor]:
    """Every member's x, concatenated along `dim`; `sizes` are the members' lengths if they differ."""
    dim = _normalized_dim(x, dim)
    what = f"all_gather over {group.axis}: dim {dim}"
    own_length = x.shape[dim]
    if sizes is None:
        lengths = (own_length,) * group.degree
    else:
        lengths = member_sizes(sizes, group.degree, what=what)
    if lengths[group.index] != own_length:
        raise CommError(f"{what} has length {own_length} here, `sizes` say {lengths[group.index]}")
    if group.degree == 1:
        return LoweredOp(group, None, x.detach().clone)
    numels = piece_numels(x.shape, dim, lengths)
    output = x.new_empty(sum(numels))
    call = _call(
        group,
        "all_gather",
        signature_text(f"all_gather(dim {dim})", x.dtype, x.shape, variable_dim=dim),
        input=flatten(x),
        output=output,
        input_split_sizes=(x.numel(),) * group.degree,
        output_split_sizes=numels,
    )
    shapes = [with_length(x.shape, dim, length) for length in lengths]
    return LoweredOp(group, call, lambda: unpack(output, shapes, dim))


def all_gather_(buffer: Tensor, group: Group) -> LoweredOp[Tensor]:
    """Equal shards of one flat buffer: each member's own shard is copied to all members, in place."""
    own_shard = _own_shard(buffer, group, "all_gather")
    if group.degree == 1:
        return LoweredOp(group, None, lambda: buffer)
    sizes = (own_shard.numel(),) * group.degree
    call = _call(
        group,
        "all_gather",
        signature_text("all_gather(in place)", buffer.dtype, buffer.shape),
        input=own_shard,
        output=buffer.detach(),
        input_split_sizes=sizes,
        output_split_sizes=sizes,
    )
    return LoweredOp(group, call, lambda: buffer)


def reduce_scatter_(buffer: Tensor, group: Group, op: Reduce) -> LoweredOp[Tensor]:
    """Equal shards of one flat buffer: the reduction of every member's buffer, written into this
    member's own shard.
    """
    if op == "avg":
        _check_average(buffer)
    own_shard = _own_shard(buffer, group, "reduce_scatter")
    if group.degree == 1:
        return LoweredOp(group, None, lambda: own_shard)
    sizes = (own_shard.numel(),) * group.degree
    call = _call(
        group,
        "reduce_scatter",
        signature_text(f"reduce_scatter({op}, in place)", buffer.dtype, buffer.shape),
        input=buffer.detach(),
        output=own_shard,
        input_split_sizes=sizes,
        output_split_sizes=sizes,
        reduce=op,
    )
    return LoweredOp(group, call, lambda: own_shard)


def reduce_scatter(
    x: Tensor, group: Group, dim: int, op: Reduce, sizes: Sequence[int] | None
) -> LoweredOp[Tensor]:
    """This member's piece, along `dim`, of the reduction of every member's x."""
    if op == "avg":
        _check_average(x)
    dim = _normalized_dim(x, dim)
    what = f"reduce_scatter over {group.axis}: dim {dim}"
    lengths = split_sizes(x.shape[dim], group.degree, sizes, what=what)
    if group.degree == 1:
        return LoweredOp(group, None, x.detach().clone)
    numels = piece_numels(x.shape, dim, lengths)
    own_numel = numels[group.index]
    output = x.new_empty(own_numel)
    call = _call(
        group,
        "reduce_scatter",
        signature_text(f"reduce_scatter({op}, dim {dim})", x.dtype, x.shape),
        input=pack(x, dim, lengths),
        output=output,
        input_split_sizes=numels,
        output_split_sizes=(own_numel,) * group.degree,
        reduce=op,
    )
    own_length = lengths[group.index]
    shape = with_length(x.shape, dim, own_length)
    return LoweredOp(group, call, lambda: output.view(shape))


def all_to_all(
    x: Tensor, group: Group, send_sizes: Sequence[int] | None, recv_sizes: Sequence[int] | None
) -> LoweredOp[Tensor]:
    """Along dim 0: piece j goes to member j; the result holds the received pieces in group order."""
    _normalized_dim(x, 0)
    what = f"all_to_all over {group.axis}: dim 0"
    sent = split_sizes(x.shape[0], group.degree, send_sizes, what=what)
    received = sent
    if recv_sizes is not None:
        received = member_sizes(recv_sizes, group.degree, what=what)
    if group.degree == 1:
        return LoweredOp(group, None, x.detach().clone)
    output_numels = piece_numels(x.shape, 0, received)
    output = x.new_empty(sum(output_numels))
    call = _call(
        group,
        "all_to_all",
        signature_text("all_to_all", x.dtype, x.shape, variable_dim=0),
        input=flatten(x),
        output=output,
        input_split_sizes=piece_numels(x.shape, 0, sent),
        output_split_sizes=output_numels,
    )
    shape = with_length(x.shape, 0, sum(received))
    return LoweredOp(group, call, lambda: output.view(shape))


def broadcast_(x: Tensor, group: Group, root: int) -> LoweredOp[Tensor]:
    """x of member `root`, written into every member's x."""
    group.check_member(root, "root")
    if group.degree == 1:
        return LoweredOp(group, None, lambda: x)
    output = flatten(x)
    signature = signature_text(f"broadcast(root {root})", x.dtype, x.shape)
    call = _call(group, "broadcast", signature, output=output, root=root)
    return LoweredOp(group, call, lambda: _copy_back(x, output))


def gather(x: Tensor, group: Group, root: int) -> LoweredOp[tuple[Tensor, ...] | None]:
    """Every member's x, at member `root`; None elsewhere."""
    group.check_member(root, "root")
    if group.degree == 1:
        return LoweredOp(group, None, lambda: (x.detach().clone(),))
    is_root = group.index == root
    output = x.new_empty(x.numel() * group.degree) if is_root else None
    call = _call(
        group,
        "gather",
        signature_text(f"gather(root {root})", x.dtype, x.shape),
        input=flatten(x),
        output=output,
        root=root,
    )

    def finish() -> tuple[Tensor, ...] | None:
        if output is None:
            return None
        return output.view(group.degree, *x.shape).unbind(0)

    return LoweredOp(group, call, finish)


def scatter(
    pieces: Sequence[Tensor] | None, out: Tensor, group: Group, root: int
) -> LoweredOp[Tensor]:
    """Piece i of `pieces` at member `root`, written into member i's `out`."""
    group.check_member(root, "root")
    is_root = group.index == root
    packed = _packed_pieces(pieces, out, group) if is_root else None
    if group.degree == 1:
        assert packed is not None, "the only member is the root"
        return LoweredOp(group, None, lambda: out.copy_(packed.view(out.shape)))
    output = flatten(out)
    signature = signature_text(f"scatter(root {root})", out.dtype, out.shape)
    call = _call(group, "scatter", signature, input=packed, output=output, root=root)
    return LoweredOp(group, call, lambda: _copy_back(out, output))


def send(x: Tensor, group: Group, to: int) -> LoweredOp[Tensor]:
    """x to member `to`; the result is x itself."""
    group.check_member(to, "send to")
    call = Call(
        op="send",
        axis=group.axis,
        ranks=_pair(source=group.ranks[group.index], destination=group.ranks[to], axis=group.axis),
        index=0,
        signature=signature_text("send", x.dtype, x.shape),
        input=flatten(x),
        members=group.ranks,
        checked=group.checked,
    )
    return LoweredOp(None, call, lambda: x)


def recv(out: Tensor, group: Group, source: int) -> LoweredOp[Tensor]:
    """What member `source` sends, written into `out`."""
    group.check_member(source, "receive from")
    output = flatten(out)
    call = Call(
        op="recv",
        axis=group.axis,
        ranks=_pair(
            source=group.ranks[source], destination=group.ranks[group.index], axis=group.axis
        ),
        index=1,
        signature=signature_text("recv", out.dtype, out.shape),
        output=output,
        members=group.ranks,
        checked=group.checked,
    )
    return LoweredOp(None, call, lambda: _copy_back(out, output))


def barrier(group: Group) -> LoweredOp[None]:
    """Complete when every member has called it."""
    call = None if group.degree == 1 else _call(group, "barrier", "barrier")
    return LoweredOp(group, call, lambda: None)


def _normalized_dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise CommError(
            f"dimension {dim} is outside shape {list(x.shape)}; a scalar needs a dimension first"
        )
    return dim % x.dim()


def _copy_back(x: Tensor, flat: Tensor) -> Tensor:
    """x, with the contents of `flat`, its flattened form."""
    if not x.is_contiguous():  # otherwise `flat` shares memory with x
        x.detach().copy_(flat.view(x.shape))
    return x


def _own_shard(buffer: Tensor, group: Group, what: str) -> Tensor:
    """This member's part of a flat buffer of equal shards, a view."""
    is_flat = buffer.dim() == 1 and buffer.is_contiguous()
    length, remainder = divmod(buffer.numel(), group.degree)
    if not is_flat or remainder:
        need = (
            f"one contiguous dimension that {group.degree} divides, got shape {list(buffer.shape)}"
        )
        raise CommError(f"{what} in place over {group.axis} needs {need}")
    return buffer.detach().narrow(0, group.index * length, length)


def _packed_pieces(pieces: Sequence[Tensor] | None, out: Tensor, group: Group) -> Tensor:
    given = list(pieces or ())
    if [piece.shape for piece in given] != [out.shape] * group.degree:
        need = f"{group.degree} pieces of shape {list(out.shape)}"
        raise CommError(f"scatter over {group.axis}: the root needs {need}")
    packed = concatenated([piece.detach().reshape(-1) for piece in given])
    if packed.dtype != out.dtype:
        raise CommError(f"scatter over {group.axis}: pieces are {packed.dtype}, out is {out.dtype}")
    return packed


def _check_average(x: Tensor) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise CommError(
            f"avg of {x.dtype} would not be an integer: reduce with sum and divide the result"
        )


def _call(
    group: Group,
    op: Op,
    signature: str,
    *,
    input: Tensor | None = None,
    output: Tensor | None = None,
    input_split_sizes: tuple[int, ...] = (),
    output_split_sizes: tuple[int, ...] = (),
    reduce: Reduce = "sum",
    root: int = 0,
) -> Call:
    """A call of a group; the arguments are fields of `Call`."""
    return Call(
        op,
        group.axis,
        group.ranks,
        group.index,
        signature,
        input=input,
        output=output,
        input_split_sizes=input_split_sizes,
        output_split_sizes=output_split_sizes,
        reduce=reduce,
        root=root,
        checked=group.checked,
        communicator=group.communicator,
    )


def _pair(*, source: int, destination: int, axis: str) -> tuple[int, int]:
    if source == destination:
        raise CommError(f"rank {source} is both source and destination of a message along {axis!r}")
    return source, destination
