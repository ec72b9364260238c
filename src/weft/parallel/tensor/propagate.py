"""Which dims of an operation's output are sharded, from those of its inputs: one rule per torch operation.

A dim is a tuple of factors, slowest first, whose sizes multiply to its local length. A view
regroups factors, so heads are followed from a projection's output through reshapes and transposes:

    q_BS(HK)  ((B),) ((S),) ((H K, sharded),)    unflatten    ((B),) ((S),) ((H, sharded),) ((K),)

An operation that mixes entries along a sharded dim (a softmax, a slice, a product that sums over
it) computes something else on a shard than on the whole tensor: its rule raises `ShardingError`, as
does an operation without a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

DECLARE_AXES = (
    "declare the axes of its parameters (Stacked for fused ones), or name axes that are not sharded"
)


class ShardingError(Exception):
    """An operation does not compute on shards what it computes on whole tensors.

    Attributes:
        fix: what the author of the module may change.
    """

    def __init__(self, message: str, *, fix: str = DECLARE_AXES) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class DimFactor:
    """Part of a dim: `size` local entries, sharded or whole.

    Attributes:
        parts: local sizes of the parts of a `Stacked` dim.
        repeated: whether all entries are equal: they fit a sharded dim as well as a whole one.
    """

    size: int
    sharded: bool = False
    parts: tuple[int, ...] = ()
    repeated: bool = False


Dim = tuple[DimFactor, ...]
Dims = tuple[Dim, ...]


def whole_dims(shape: Iterable[int]) -> Dims:
    """Dims of a tensor without a sharded one."""
    return tuple((DimFactor(size),) for size in shape)


def is_sharded(dim: Dim) -> bool:
    """Whether ranks hold different entries along this dim."""
    return any(factor.sharded for factor in dim)


def is_repeated(dim: Dim) -> bool:
    """Whether all entries along this dim are equal."""
    return all(factor.repeated or factor.size == 1 for factor in dim)


def length(dim: Dim) -> int:
    """Local entries along a dim."""
    return math.prod(factor.size for factor in dim)


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of an operation."""

    dims: Dims


@dataclass(frozen=True)
class TracedOp:
    """A call of a torch operation: its arguments by name, its tensors in order, and its results."""

    name: str
    args: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[Tensor, ...]

    @property
    def dims(self) -> Dims:
        """Dims of the first tensor among the arguments."""
        return self.operands[0].dims

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return tuple(self.outputs[0].shape)

    def place(self, default: int = 0) -> int:
        """The argument `dim`, from 0."""
        written: int = self.args.get("dim", default)
        return written % len(self.dims)


Rule = Callable[[TracedOp], list[Dims]]


def _canonical(factors: Sequence[DimFactor]) -> Dim:
    """A sharded factor absorbs the whole ones after it: a shard of their product is contiguous,
    too.
    """
    merged: list[DimFactor] = []
    for factor in factors:
        absorbs = bool(merged) and not factor.sharded and not factor.parts
        if not absorbs:
            merged.append(factor)
            continue
        last = merged[-1]
        parts = tuple(size * factor.size for size in last.parts)
        merged[-1] = replace(last, size=last.size * factor.size, parts=parts)
    return tuple(merged) or (DimFactor(1),)


def _with_dim(dims: Dims, place: int, *new: Dim) -> Dims:
    """The dims with others, or none, in place of one."""
    return (*dims[:place], *new, *dims[place + 1 :])


def _refuse_sharded(op: TracedOp, places: Iterable[int]) -> None:
    for place in places:
        if is_sharded(op.dims[place]):
            raise ShardingError(f"{op.name} over a sharded dim")


def _refuse_contraction(op: TracedOp, *dims: Dim) -> None:
    for dim in dims:
        if is_sharded(dim):
            raise ShardingError(
                f"{op.name} sums over a sharded dim outside a row-parallel nn.Linear"
            )


def _same_dims(op: TracedOp) -> list[Dims]:
    return [op.dims] * len(op.outputs)


def _elementwise(op: TracedOp) -> list[Dims]:
    dims = [operand.dims for operand in op.operands]
    return [_broadcast(op.name, dims, tuple(out.shape)) for out in op.outputs]


def _broadcast(name: str, operands: Sequence[Dims], shape: tuple[int, ...]) -> Dims:
    """Where one operand is sharded along a dim, the others are sharded, too, or all their entries
    along it are equal.
    """
    found: list[Dim] = []
    for place in range(-len(shape), 0):
        candidates = [dims[place] for dims in operands if len(dims) >= -place]
        sharded = [dim for dim in candidates if is_sharded(dim)]
        whole = [dim for dim in candidates if not is_sharded(dim) and not is_repeated(dim)]
        if sharded and whole:
            raise ShardingError(
                f"{name} of a sharded dim with a whole one of {length(whole[0])} entries"
            )
        if sharded:
            found.append(_canonical(sharded[0]))
        else:
            found.append((DimFactor(shape[place], repeated=not whole),))
    return tuple(found)


def _view(op: TracedOp) -> list[Dims]:
    return [regroup(op.dims, op.shape, inferred=_inferred_dim(op), name=op.name)]


def _inferred_dim(op: TracedOp) -> int | None:
    """The output dim whose size was written as -1."""
    for key in ("sizes", "size", "shape"):
        written = op.args.get(key)
        if isinstance(written, (tuple, list)) and -1 in written:
            offset = op.place() if op.name == "unflatten" else 0
            return offset + list(written).index(-1)
    return None


def regroup(dims: Dims, sizes: Sequence[int], *, inferred: int | None, name: str) -> Dims:
    """Dims of a view of these sizes: the factors in order, split where a size ends within one."""
    stream = [factor for dim in dims for factor in dim if factor.size > 1 or factor.sharded]
    found: list[Dim] = []
    for place, size in enumerate(sizes):
        taken: list[DimFactor] = []
        remaining = size
        while stream and (remaining > 1 or _is_one_unit(stream[0], sizes, place, inferred)):
            factor = stream.pop(0)
            if factor.size > remaining:
                factor, rest = _split(factor, remaining, name)
                stream.insert(0, rest)
            if remaining % factor.size:
                raise ShardingError(f"{name} regroups entries across the ends of a sharded dim")
            remaining //= factor.size
            taken.append(factor)
            if remaining == 1 and factor.sharded:
                break
        found.append(_canonical(taken) if taken else (DimFactor(size),))
    return tuple(found)


def _is_one_unit(factor: DimFactor, sizes: Sequence[int], place: int, inferred: int | None) -> bool:
    """Whether an output dim of size 1 is this rank's only unit (one head), not an inserted dim."""
    if sizes[place] != 1 or not factor.sharded:
        return False
    if factor.size == 1:
        return True
    following = sizes[place + 1] if place + 1 < len(sizes) else 1
    return following == factor.size and inferred != place + 1


def _split(factor: DimFactor, outer: int, name: str) -> tuple[DimFactor, DimFactor]:
    """A factor as an outer one of this size and the rest."""
    if factor.size % outer:
        raise ShardingError(f"{name} regroups {factor.size} local entries by {outer}")
    inner = factor.size // outer
    if not factor.parts:
        return replace(factor, size=outer), DimFactor(inner)
    counts_parts = len(factor.parts) == outer and len(set(factor.parts)) == 1
    if counts_parts:
        return DimFactor(outer), DimFactor(inner, sharded=factor.sharded)
    if any(size % inner for size in factor.parts):
        raise ShardingError(f"{name} regroups entries across the parts of a Stacked dim")
    parts = tuple(size // inner for size in factor.parts)
    return DimFactor(outer, factor.sharded, parts), DimFactor(inner)


def _transpose(op: TracedOp) -> list[Dims]:
    dims = list(op.dims)
    if op.name == "t":
        return [tuple(reversed(dims))]
    first = op.args["dim0"]
    second = op.args["dim1"]
    dims[first], dims[second] = dims[second], dims[first]
    return [tuple(dims)]


def _permute(op: TracedOp) -> list[Dims]:
    order = op.args["dims"]
    return [tuple(op.dims[place] for place in order)]


def _unsqueeze(op: TracedOp) -> list[Dims]:
    dims = list(op.dims)
    place = op.args["dim"] % (len(dims) + 1)
    dims.insert(place, (DimFactor(1),))
    return [tuple(dims)]


def _squeeze(op: TracedOp) -> list[Dims]:
    asked = _places(op.dims, op.args.get("dim"))
    gone = [place for place in asked if length(op.dims[place]) == 1]
    _refuse_sharded(op, gone)
    kept = [dim for place, dim in enumerate(op.dims) if place not in gone]
    return [tuple(kept)]


def _expand(op: TracedOp) -> list[Dims]:
    """Also repeat: new dims and those of one entry hold equal entries afterwards."""
    num_new = len(op.shape) - len(op.dims)
    found: list[Dim] = [(DimFactor(size, repeated=True),) for size in op.shape[:num_new]]
    for dim, size in zip(op.dims, op.shape[num_new:], strict=True):
        if length(dim) == size:
            found.append(dim)
        elif is_sharded(dim):
            raise ShardingError(f"{op.name} of a sharded dim")
        else:
            found.append((DimFactor(size, repeated=length(dim) == 1),))
    return [tuple(found)]


def _select(op: TracedOp) -> list[Dims]:
    """Also unbind: one entry of a whole dim."""
    place = op.place()
    if is_sharded(op.dims[place]):
        raise ShardingError(f"{op.name} along a sharded dim")
    return [_with_dim(op.dims, place)] * len(op.outputs)


def _split_dim(op: TracedOp) -> list[Dims]:
    """split, slice: parts of a whole dim, or exactly the parts of a `Stacked` one."""
    place = op.place()
    dim = op.dims[place]
    sizes = tuple(out.shape[place] for out in op.outputs)
    if sizes == (length(dim),):
        return [op.dims]
    sharded = is_sharded(dim)
    if sharded:
        _check_parts(op, dim, sizes)
    return [_with_dim(op.dims, place, (DimFactor(size, sharded),)) for size in sizes]


def _check_parts(op: TracedOp, dim: Dim, sizes: tuple[int, ...]) -> None:
    parts = dim[0].parts if len(dim) == 1 else ()
    if op.name != "slice":
        if sizes != parts:
            raise ShardingError(
                f"{op.name} of a sharded dim into {len(sizes)}, which are no parts of a Stacked axis"
            )
        return
    start = op.args.get("start") or 0
    step = op.args.get("step", 1)
    part_start = 0
    for size in parts:
        if (part_start, size, 1) == (start, sizes[0], step):
            return
        part_start += size
    raise ShardingError("slice of a sharded dim, which is no part of a Stacked axis")


def _cat(op: TracedOp) -> list[Dims]:
    """Along whole dims; shards of two tensors one after the other are a `Stacked` dim."""
    num_dims = len(op.shape)
    place = op.args.get("dim", 0) % num_dims
    operands = [operand.dims for operand in op.operands if len(operand.dims) == num_dims]
    along = [dims[place] for dims in operands]
    one: Dim = (DimFactor(1),)
    others = [_with_dim(dims, place, one) for dims in operands]
    shape = (*op.shape[:place], 1, *op.shape[place + 1 :])
    dims = _broadcast(op.name, others, shape)
    sharded = [is_sharded(dim) for dim in along]
    if not any(sharded):
        return [_with_dim(dims, place, (DimFactor(op.shape[place]),))]
    if not all(sharded):
        raise ShardingError("cat of a sharded dim and a whole one")
    parts = tuple(length(dim) for dim in along)
    stacked = DimFactor(sum(parts), sharded=True, parts=parts)
    return [_with_dim(dims, place, (stacked,))]


def _stack(op: TracedOp) -> list[Dims]:
    place = op.args.get("dim", 0) % len(op.shape)
    inner_shape = (*op.shape[:place], *op.shape[place + 1 :])
    operands = [operand.dims for operand in op.operands]
    inner = _broadcast(op.name, operands, inner_shape)
    new: Dim = (DimFactor(op.shape[place]),)
    stacked = (*inner[:place], new, *inner[place:])
    return [stacked]


def _linear(op: TracedOp) -> list[Dims]:
    x, weight, *bias = (operand.dims for operand in op.operands)
    _refuse_contraction(op, x[-1], weight[1])
    for dims in bias:
        if is_sharded(dims[0]) != is_sharded(weight[0]):
            raise ShardingError(
                "linear whose weight is sharded and whose bias is not, or the other way round"
            )
    return [(*x[:-1], weight[0])]


def _matrix_product(op: TracedOp) -> list[Dims]:
    """mm, bmm, addmm, baddbmm: [..., N, K] x [..., K, M]."""
    a = op.operands[-2].dims
    b = op.operands[-1].dims
    _refuse_contraction(op, a[-1], b[-2])
    batch = a[:-2]
    for left, right in zip(batch, b[:-2], strict=True):
        if is_sharded(left) != is_sharded(right):
            raise ShardingError(f"{op.name} of a sharded batch dim with a whole one")
    return [(*batch, a[-2], b[-1])]


def _reduction(op: TracedOp) -> list[Dims]:
    """Operations along `dim`, or over all entries: allowed where that dim is whole."""
    places = _places(op.dims, op.args.get("dim"))
    _refuse_sharded(op, places)
    found: list[Dims] = []
    for out in op.outputs:
        keeps_dims = out.dim() == len(op.dims)
        dims: list[Dim] = []
        for place, dim in enumerate(op.dims):
            if place not in places:
                dims.append(dim)
            elif keeps_dims:
                dims.append((DimFactor(out.shape[place]),))
        found.append(tuple(dims))
    return found


def _places(dims: Dims, written: Any) -> list[int]:
    """The dims that an argument `dim` names, from 0; all where it names none."""
    if written is None or written == []:
        return list(range(len(dims)))
    several = written if isinstance(written, (tuple, list)) else [written]
    return [place % len(dims) for place in several]


def _norm(op: TracedOp) -> list[Dims]:
    num_dims = len(op.dims)
    num_normalized = len(op.args["normalized_shape"])
    _refuse_sharded(op, range(num_dims - num_normalized, num_dims))
    return _same_dims(op)


def _embedding(op: TracedOp) -> list[Dims]:
    table = op.operands[0].dims
    index = op.operands[1].dims
    _refuse_contraction(op, table[0])
    return [(*index, table[1])]


def _index_select(op: TracedOp) -> list[Dims]:
    place = op.place()
    _refuse_sharded(op, [place])
    index = op.operands[1].dims
    return [_with_dim(op.dims, place, index[0])]


def _pad(op: TracedOp) -> list[Dims]:
    last = len(op.dims) - 1
    padded = {last - index // 2 for index, size in enumerate(op.args["pad"]) if size}
    _refuse_sharded(op, padded)
    dims = op.dims
    for place in padded:
        dims = _with_dim(dims, place, (DimFactor(op.shape[place]),))
    return [dims]


def _triangle(op: TracedOp) -> list[Dims]:
    num_dims = len(op.dims)
    _refuse_sharded(op, (num_dims - 2, num_dims - 1))
    return [op.dims]


def _attention(op: TracedOp) -> list[Dims]:
    """[B, H, S, K]: heads may be sharded, of queries, keys and values alike; one key/value head
    serves all queries.
    """
    q, k, v = (operand.dims for operand in op.operands[:3])
    for dims in (q, k, v):
        _refuse_contraction(op, *dims[2:])
    has_one_kv_head = length(k[1]) == 1 and not is_sharded(k[1])
    same_heads = is_sharded(q[1]) == is_sharded(k[1]) == is_sharded(v[1])
    if not same_heads and not has_one_kv_head:
        raise ShardingError("attention of sharded heads with whole ones")
    return [(*q[:-1], v[-1])]


def _repeat_interleave(op: TracedOp) -> list[Dims]:
    if op.args.get("dim") is None:
        raise ShardingError("repeat_interleave of a flattened sharded tensor")
    place = op.place()
    dim = op.dims[place]
    repeats = op.shape[place] // length(dim)
    repeated = _canonical((*dim, DimFactor(repeats)))
    return [_with_dim(op.dims, place, repeated)]


def _copy_into(op: TracedOp) -> list[Dims]:
    """dst.copy_(src): dst holds what src held."""
    source = op.operands[1].dims
    return [_broadcast(op.name, [source], op.shape)]


_RULES: dict[Rule, tuple[str, ...]] = {
    _same_dims: (
        "_to_copy", "contiguous", "detach", "alias", "lift_fresh", "zeros_like", "ones_like", "empty_like", "full_like",
        "rand_like", "randn_like", "bernoulli", "bernoulli_", "native_dropout", "zero_", "fill_", "clone", "_conj",
    ),
    _view: ("view", "_unsafe_view", "reshape", "unflatten", "flatten", "_reshape_alias"),
    _transpose: ("transpose", "t"),
    _permute: ("permute",),
    _unsqueeze: ("unsqueeze",),
    _squeeze: ("squeeze",),
    _expand: ("expand", "repeat"),
    _split_dim: ("split", "split_with_sizes", "slice"),
    _select: ("select", "unbind"),
    _cat: ("cat", "concat", "concatenate"),
    _stack: ("stack",),
    _linear: ("linear",),
    _matrix_product: ("mm", "bmm", "addmm", "baddbmm"),
    _reduction: (
        "sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "prod", "any", "all", "argmax", "argmin",
        "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "cumsum", "cumprod", "linalg_vector_norm",
        "norm", "topk", "sort", "argsort", "flip", "roll",
    ),
    _norm: ("rms_norm", "layer_norm", "native_layer_norm", "_fused_rms_norm"),
    _embedding: ("embedding",),
    _index_select: ("index_select",),
    _pad: ("constant_pad_nd", "pad"),
    _triangle: ("tril", "triu"),
    _attention: ("scaled_dot_product_attention",),
    _repeat_interleave: ("repeat_interleave",),
    _copy_into: ("copy_",),
}  # fmt: skip

RULES: Mapping[str, Rule] = {name: rule for rule, names in _RULES.items() for name in names}
"""Rule of each operation, by its name in torch.ops.aten; elementwise ones are known by their tag.
"""


def rule_of(func: Any) -> Rule | None:
    """The rule of an operation, if it has one."""
    name = func.overloadpacket.__name__
    if name in RULES:
        return RULES[name]
    return _elementwise if torch.Tag.pointwise in func.tags else None


def arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operation's schema."""
    names = [argument.name for argument in func._schema.arguments]
    by_name = dict(zip(names, args, strict=False))
    by_name.update(kwargs)
    return by_name
