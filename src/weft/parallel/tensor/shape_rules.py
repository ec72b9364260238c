"""Dims of the results of operations that only rearrange entries: views, transposes, slices, concatenations, padding."""

from __future__ import annotations

from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    canonical,
    is_sharded,
    length,
    regroup,
    whole_dim,
    with_dim,
)
from weft.parallel.tensor.traced_op import TracedOp, broadcast_dims, places_named, reject_sharded


def same_dims(op: TracedOp) -> list[Dims]:
    """Results like the first tensor."""
    return [op.dims for _ in op.outputs]


def view(op: TracedOp) -> list[Dims]:
    """The same entries in another shape."""
    dims = regroup(op.dims, op.shape, inferred=_inferred_dim(op), name=op.name)
    return [dims]


def _inferred_dim(op: TracedOp) -> int | None:
    """The output dim whose size was written as -1."""
    for key in ("sizes", "size", "shape"):
        written = op.args.get(key)
        if not isinstance(written, (tuple, list)) or -1 not in written:
            continue
        place = list(written).index(-1)
        if op.name == "unflatten":
            place += op.place()
        return place
    return None


def transpose(op: TracedOp) -> list[Dims]:
    """transpose, t: two dims swapped."""
    dims = list(op.dims)
    if op.name == "t":
        dims.reverse()
        return [tuple(dims)]
    first = op.args["dim0"]
    second = op.args["dim1"]
    dims[first], dims[second] = dims[second], dims[first]
    return [tuple(dims)]


def permute(op: TracedOp) -> list[Dims]:
    """The dims in another order."""
    order = op.args["dims"]
    dims = [op.dims[place] for place in order]
    return [tuple(dims)]


def unsqueeze(op: TracedOp) -> list[Dims]:
    """A new dim of one entry."""
    dims = list(op.dims)
    num_places = len(dims) + 1
    place = op.args["dim"] % num_places
    dims.insert(place, whole_dim(1))
    return [tuple(dims)]


def squeeze(op: TracedOp) -> list[Dims]:
    """Dims of one entry removed."""
    asked = places_named(op.dims, op.args.get("dim"))
    gone = [place for place in asked if length(op.dims[place]) == 1]
    reject_sharded(op, gone)
    kept: list[Dim] = []
    for place, dim in enumerate(op.dims):
        if place not in gone:
            kept.append(dim)
    return [tuple(kept)]


def expand(op: TracedOp) -> list[Dims]:
    """Also repeat: new dims and those of one entry hold equal entries afterwards; copies of a sharded dim,
    one after another, are a dim of their own before it.
    """
    num_new = len(op.shape) - len(op.dims)
    new_sizes = op.shape[:num_new]
    old_sizes = op.shape[num_new:]
    found: list[Dim] = [(DimFactor(size, repeated=True),) for size in new_sizes]
    for dim, size in zip(op.dims, old_sizes, strict=True):
        old_size = length(dim)
        if old_size == size:
            found.append(dim)
        elif is_sharded(dim) and op.name == "repeat":
            found.append(canonical((DimFactor(size // old_size, repeated=True), *dim)))
        elif is_sharded(dim):
            raise ShardingError(f"{op.name} of a sharded dim")
        else:
            found.append((DimFactor(size, repeated=old_size == 1),))
    return [tuple(found)]


def select(op: TracedOp) -> list[Dims]:
    """Remove a whole dim by taking one entry of it; unbind takes each."""
    place = op.place()
    dim = op.dims[place]
    if is_sharded(dim):
        raise ShardingError(f"{op.name} along a sharded dim")
    rest = with_dim(op.dims, place)
    return [rest for _ in op.outputs]


def split_dim(op: TracedOp) -> list[Dims]:
    """split, slice: parts of a whole dim, or exactly the parts of a `Stacked` one."""
    place = op.place()
    dim = op.dims[place]
    sizes = tuple(out.shape[place] for out in op.outputs)
    if sizes == (length(dim),):
        return [op.dims]
    sharded = is_sharded(dim)
    if sharded:
        _check_parts(op, dim, sizes)
    found: list[Dims] = []
    for size in sizes:
        part = DimFactor(size, sharded)
        found.append(with_dim(op.dims, place, (part,)))
    return found


def _check_parts(op: TracedOp, dim: Dim, sizes: tuple[int, ...]) -> None:
    """Raise ShardingError unless these pieces of a sharded dim are parts of a Stacked one."""
    parts = _parts(dim)
    if op.name != "slice":
        if sizes != parts:
            raise ShardingError(
                f"{op.name} of a sharded dim into {len(sizes)}, which are no parts of a Stacked axis"
            )
        return
    start = op.args.get("start") or 0
    step = op.args.get("step", 1)
    asked = (start, sizes[0], step)
    part_start = 0
    for size in parts:
        if asked == (part_start, size, 1):
            return
        part_start += size
    raise ShardingError("slice of a sharded dim, which is no part of a Stacked axis")


def cat(op: TracedOp) -> list[Dims]:
    """Along whole dims; shards of two tensors one after the other are a `Stacked` dim."""
    num_dims = len(op.shape)
    place = op.args.get("dim", 0) % num_dims
    along: list[Dim] = []
    others: list[Dims] = []
    for dims in op.operands:
        if len(dims) == num_dims:
            along.append(dims[place])
            others.append(with_dim(dims, place, whole_dim(1)))
    shape = list(op.shape)
    shape[place] = 1
    dims = broadcast_dims(op.name, others, tuple(shape))
    sharded = [is_sharded(dim) for dim in along]
    if not any(sharded):
        size = op.shape[place]
        return [with_dim(dims, place, whole_dim(size))]
    if not all(sharded):
        raise ShardingError("cat of a sharded dim and a whole one")
    parts = tuple(part for dim in along for part in _parts(dim))
    stacked = DimFactor(sum(parts), sharded=True, parts=parts)
    return [with_dim(dims, place, (stacked,))]


def _parts(dim: Dim) -> tuple[int, ...]:
    """Local sizes of the parts of a sharded dim."""
    return (dim[0].parts if len(dim) == 1 else ()) or (length(dim),)


def stack(op: TracedOp) -> list[Dims]:
    """Along a new dim."""
    num_dims = len(op.shape)
    place = op.args.get("dim", 0) % num_dims
    shape = list(op.shape)
    num_stacked = shape.pop(place)
    dims = list(broadcast_dims(op.name, op.operands, tuple(shape)))
    dims.insert(place, whole_dim(num_stacked))
    return [tuple(dims)]


def pad(op: TracedOp) -> list[Dims]:
    """Whole dims become longer; `pad` holds two numbers a dim, the last dim's first."""
    last = len(op.dims) - 1
    padded: set[int] = set()
    for index, size in enumerate(op.args["pad"]):
        if size:
            padded.add(last - index // 2)
    reject_sharded(op, padded)
    dims = op.dims
    for place in padded:
        size = op.shape[place]
        dims = with_dim(dims, place, whole_dim(size))
    return [dims]


def repeat_interleave(op: TracedOp) -> list[Dims]:
    """Each entry several times, one after the other."""
    if op.args.get("dim") is None:
        raise ShardingError("repeat_interleave of a flattened sharded tensor")
    place = op.place()
    dim = op.dims[place]
    repeats = op.shape[place] // length(dim)
    repeated = canonical((*dim, DimFactor(repeats)))
    return [with_dim(op.dims, place, repeated)]
