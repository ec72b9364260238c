"""Which dims of an operation's output are sharded, from those of its inputs: one rule per torch operation.

A dim is a tuple of factors, slowest first, whose sizes multiply to its local length. A view regroups factors, so heads
are followed from a projection's output through reshapes and transposes:

    q_BS(HK)  ((B),) ((S),) ((H K, sharded),)    unflatten    ((B),) ((S),) ((H, sharded),) ((K),)

An operation that mixes entries along a sharded dim (a softmax, a slice, a product that sums over it) computes something else on a
shard than on the whole tensor: its rule raises `ShardingError`, as does an operation without a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


class ShardingError(Exception):
    """An operation does not compute on shards what it computes on whole tensors."""


@dataclass(frozen=True)
class Factor:
    """Part of a dim: `size` local entries, sharded or whole.

    Attributes:
        parts: local sizes of the parts of a `Stacked` dim.
        repeated: whether all entries are equal: they fit a sharded dim as well as a whole one.
    """

    size: int
    sharded: bool = False
    parts: tuple[int, ...] = ()
    repeated: bool = False


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def whole_dims(shape: Iterable[int]) -> Dims:
    """Dims of a tensor without a sharded one."""
    return tuple((Factor(size),) for size in shape)


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
    """A tensor among the arguments of an operation, and its dims."""

    tensor: Tensor
    dims: Dims


@dataclass(frozen=True)
class Operation:
    """A call of a torch operation: its arguments by name, its tensors in order, and its result."""

    name: str
    args: Mapping[str, Any]
    operands: tuple[Operand, ...]
    dims_of: Callable[[Tensor], Dims]
    result: Any

    @property
    def first(self) -> Operand:
        """The first tensor among the arguments."""
        return self.operands[0]

    def outputs(self) -> list[Tensor]:
        """The tensors of the result."""
        return list(self.result) if isinstance(self.result, (tuple, list)) else [self.result]


Rule = Callable[[Operation], list[Dims]]


def _canonical(dim: Dim) -> Dim:
    """A sharded factor absorbs the whole ones after it: a shard of their product is contiguous, too."""
    merged: list[Factor] = []
    for factor in dim:
        last = merged[-1] if merged else None
        if last is not None and not factor.sharded and not factor.parts:
            parts = tuple(size * factor.size for size in last.parts)
            merged[-1] = replace(last, size=last.size * factor.size, parts=parts)
        else:
            merged.append(factor)
    return tuple(merged) if merged else (Factor(1),)


def _same_dims(op: Operation) -> list[Dims]:
    return [op.first.dims for _ in op.outputs()]


def _elementwise(op: Operation) -> list[Dims]:
    """Broadcast: where one operand is sharded along a dim, the others are sharded or have one entry."""
    return [_broadcast(op, out.shape) for out in op.outputs()]


def _broadcast(op: Operation, shape: Sequence[int]) -> Dims:
    found: list[Dim] = []
    for place in range(-len(shape), 0):
        candidates = [operand.dims[place] for operand in op.operands if len(operand.dims) >= -place]
        sharded = [dim for dim in candidates if is_sharded(dim)]
        whole = [dim for dim in candidates if not is_sharded(dim) and not is_repeated(dim)]
        if sharded and whole:
            raise ShardingError(f"{op.name} of a sharded dim with a whole one of {length(whole[0])} entries")
        found.append(_canonical(sharded[0]) if sharded else (Factor(shape[place], repeated=not whole),))
    return tuple(found)


def _view(op: Operation) -> list[Dims]:
    sizes = list(op.result.shape)
    inferred = _inferred_dim(op)
    return [regroup(op.first.dims, sizes, inferred=inferred, name=op.name)]


def _inferred_dim(op: Operation) -> int | None:
    """The output dim whose size was written as -1."""
    written = op.args.get("sizes", op.args.get("size", op.args.get("shape")))
    if not isinstance(written, (tuple, list)) or -1 not in written:
        return None
    offset = op.args["dim"] % op.first.tensor.dim() if op.name == "unflatten" else 0
    return offset + list(written).index(-1)


def regroup(dims: Dims, sizes: Sequence[int], *, inferred: int | None, name: str) -> Dims:
    """Dims of a view of these sizes: the factors in order, split where a size ends within one."""
    stream = [factor for dim in dims for factor in dim if factor.size > 1 or factor.sharded]
    found: list[Dim] = []
    for place, size in enumerate(sizes):
        taken: list[Factor] = []
        remaining = size
        while stream and (remaining > 1 or _ends_with_one_unit(stream[0], sizes, place, inferred)):
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
        found.append(_canonical(tuple(taken)) if taken else (Factor(size),))
    return tuple(found)


def _ends_with_one_unit(factor: Factor, sizes: Sequence[int], place: int, inferred: int | None) -> bool:
    """Whether an output dim of size 1 is this rank's only unit (one head), not an inserted dim."""
    if sizes[place] != 1 or not factor.sharded:
        return False
    if factor.size == 1:
        return True
    following = sizes[place + 1] if place + 1 < len(sizes) else 1
    return following == factor.size and inferred != place + 1


def _split(factor: Factor, outer: int, name: str) -> tuple[Factor, Factor]:
    """A factor as an outer one of this size and the rest."""
    if factor.size % outer:
        raise ShardingError(f"{name} regroups {factor.size} local entries by {outer}")
    inner = factor.size // outer
    if not factor.parts:
        return replace(factor, size=outer), Factor(inner)
    if len(factor.parts) == outer and len(set(factor.parts)) == 1:
        return Factor(outer), Factor(inner, sharded=factor.sharded)
    if any(size % inner for size in factor.parts):
        raise ShardingError(f"{name} regroups entries across the parts of a Stacked dim")
    parts = tuple(size // inner for size in factor.parts)
    return Factor(outer, factor.sharded, parts), Factor(inner)


def _transpose(op: Operation) -> list[Dims]:
    dims = list(op.first.dims)
    if op.name == "t":
        return [tuple(reversed(dims))]
    first, second = op.args["dim0"], op.args["dim1"]
    dims[first], dims[second] = dims[second], dims[first]
    return [tuple(dims)]


def _permute(op: Operation) -> list[Dims]:
    return [tuple(op.first.dims[place] for place in op.args["dims"])]


def _unsqueeze(op: Operation) -> list[Dims]:
    dims = list(op.first.dims)
    dims.insert(op.args["dim"] % (len(dims) + 1), (Factor(1),))
    return [tuple(dims)]


def _squeeze(op: Operation) -> list[Dims]:
    written = op.args.get("dim")
    places = _places(op.first.dims, written)
    gone = {place for place in places if length(op.first.dims[place]) == 1}
    _refuse_sharded(op, [place for place in gone])
    return [tuple(dim for place, dim in enumerate(op.first.dims) if place not in gone)]


def _expand(op: Operation) -> list[Dims]:
    shape = op.result.shape
    added = len(shape) - len(op.first.dims)
    found: list[Dim] = [(Factor(size, repeated=True),) for size in shape[:added]]
    for dim, size in zip(op.first.dims, shape[added:], strict=True):
        if length(dim) != size and is_sharded(dim):
            raise ShardingError("expand of a sharded dim")
        found.append(dim if length(dim) == size else (Factor(size, repeated=True),))
    return [tuple(found)]


def _parts_along(op: Operation) -> list[Dims]:
    """split, slice, select, unbind: parts of a whole dim, or exactly the parts of a `Stacked` one."""
    place = op.args.get("dim", 0) % len(op.first.dims)
    dim = op.first.dims[place]
    drops = op.name in ("select", "unbind")
    outputs = op.outputs()
    if not is_sharded(dim):
        return [_with_dim(op.first.dims, place, None if drops else (Factor(out.shape[place]),)) for out in outputs]
    if drops:
        raise ShardingError(f"{op.name} along a sharded dim")
    sizes = [out.shape[place] for out in outputs]
    if sizes == [length(dim)]:
        return [op.first.dims]
    parts = dim[0].parts if len(dim) == 1 else ()
    if op.name == "slice":
        start = op.args.get("start") or 0
        bounds = [sum(parts[:index]) for index in range(len(parts))]
        if op.args.get("step", 1) != 1 or (start, sizes[0]) not in zip(bounds, parts, strict=True):
            raise ShardingError("slice of a sharded dim, which is no part of a Stacked axis")
    elif tuple(sizes) != parts:
        raise ShardingError(f"{op.name} of a sharded dim into {len(sizes)}, which are no parts of a Stacked axis")
    return [_with_dim(op.first.dims, place, (Factor(size, sharded=True),)) for size in sizes]


def _with_dim(dims: Dims, place: int, dim: Dim | None) -> Dims:
    return (*dims[:place], *(() if dim is None else (dim,)), *dims[place + 1 :])


def _cat(op: Operation) -> list[Dims]:
    """Along whole dims; shards of two tensors one after the other are a `Stacked` dim."""
    place = op.args.get("dim", 0) % op.result.dim()
    operands = [operand for operand in op.operands if operand.tensor.dim() == op.result.dim()]
    along = [operand.dims[place] for operand in operands]
    others = [Operand(operand.tensor, _with_dim(operand.dims, place, (Factor(1),))) for operand in operands]
    shape = [*op.result.shape]
    shape[place] = 1
    dims = _broadcast(replace(op, operands=tuple(others)), shape)
    if not any(map(is_sharded, along)):
        return [_with_dim(dims, place, (Factor(op.result.shape[place]),))]
    if not all(map(is_sharded, along)):
        raise ShardingError("cat of a sharded dim and a whole one")
    sizes = tuple(map(length, along))
    return [_with_dim(dims, place, (Factor(sum(sizes), sharded=True, parts=sizes),))]


def _stack(op: Operation) -> list[Dims]:
    place = op.args.get("dim", 0) % op.result.dim()
    inner = [size for index, size in enumerate(op.result.shape) if index != place]
    dims = list(_broadcast(op, inner))
    dims.insert(place, (Factor(op.result.shape[place]),))
    return [tuple(dims)]


def _linear(op: Operation) -> list[Dims]:
    x, weight = op.operands[:2]
    _refuse_contraction(op, x.dims[-1], weight.dims[1])
    if len(op.operands) > 2 and is_sharded(op.operands[2].dims[0]) != is_sharded(weight.dims[0]):
        raise ShardingError("linear whose weight is sharded and whose bias is not, or the other way round")
    return [(*x.dims[:-1], weight.dims[0])]


def _matrix_product(op: Operation) -> list[Dims]:
    """mm, bmm, addmm, baddbmm: [..., N, K] x [..., K, M]."""
    a, b = op.operands[-2:]
    _refuse_contraction(op, a.dims[-1], b.dims[-2])
    batch: Dims = ()
    if len(a.dims) == 3:
        left, right = a.dims[0], b.dims[0]
        if is_sharded(left) != is_sharded(right):
            raise ShardingError(f"{op.name} of a sharded batch dim with a whole one")
        batch = (left,)
    return [(*batch, a.dims[-2], b.dims[-1])]


def _refuse_contraction(op: Operation, *dims: Dim) -> None:
    if any(map(is_sharded, dims)):
        raise ShardingError(f"{op.name} sums over a sharded dim outside a row-parallel nn.Linear")


def _reduction(op: Operation) -> list[Dims]:
    """Operations along `dim`, or over all entries: allowed where that dim is whole."""
    places = _places(op.first.dims, op.args.get("dim"))
    _refuse_sharded(op, places)
    found = []
    for out in op.outputs():
        if out.dim() == len(op.first.dims):
            pairs = zip(op.first.dims, out.shape, strict=True)
            found.append(tuple((Factor(size),) if i in places else dim for i, (dim, size) in enumerate(pairs)))
        else:
            found.append(tuple(dim for i, dim in enumerate(op.first.dims) if i not in places))
    return found


def _places(dims: Dims, written: Any) -> list[int]:
    if written is None or written == []:
        return list(range(len(dims)))
    several = written if isinstance(written, (tuple, list)) else [written]
    return [place % len(dims) for place in several]


def _refuse_sharded(op: Operation, places: Sequence[int]) -> None:
    if any(is_sharded(op.first.dims[place]) for place in places):
        raise ShardingError(f"{op.name} over a sharded dim")


def _norm(op: Operation) -> list[Dims]:
    count = len(op.args["normalized_shape"])
    _refuse_sharded(op, range(len(op.first.dims) - count, len(op.first.dims)))
    return [op.first.dims for _ in op.outputs()]


def _embedding(op: Operation) -> list[Dims]:
    table, index = op.operands
    _refuse_contraction(op, table.dims[0])
    return [(*index.dims, table.dims[1])]


def _index_select(op: Operation) -> list[Dims]:
    place = op.args["dim"] % len(op.first.dims)
    _refuse_sharded(op, [place])
    return [_with_dim(op.first.dims, place, op.operands[1].dims[0])]


def _pad(op: Operation) -> list[Dims]:
    pad = op.args["pad"]
    padded = [-1 - index // 2 for index, size in enumerate(pad) if size]
    _refuse_sharded(op, [place % len(op.first.dims) for place in padded])
    pairs = zip(op.first.dims, op.result.shape, strict=True)
    return [tuple(dim if length(dim) == size else (Factor(size),) for dim, size in pairs)]


def _triangle(op: Operation) -> list[Dims]:
    _refuse_sharded(op, [len(op.first.dims) - 2, len(op.first.dims) - 1])
    return [op.first.dims]


def _attention(op: Operation) -> list[Dims]:
    """[B, H, S, K]: heads may be sharded, of queries, keys and values alike."""
    q, k, v = op.operands[:3]
    has_one_kv_head = length(k.dims[1]) == 1 and not is_sharded(k.dims[1])
    per_head = (q,) if has_one_kv_head else (q, k, v)
    if len({is_sharded(operand.dims[1]) for operand in per_head}) > 1:
        raise ShardingError("attention of sharded heads with whole ones")
    for operand in (q, k, v):
        _refuse_contraction(op, *operand.dims[2:])
    return [(*q.dims[:-1], v.dims[-1])]


def _repeat_interleave(op: Operation) -> list[Dims]:
    if op.args.get("dim") is None:
        raise ShardingError("repeat_interleave of a flattened sharded tensor")
    place = op.args["dim"] % len(op.first.dims)
    repeats = op.result.shape[place] // length(op.first.dims[place])
    return [_with_dim(op.first.dims, place, _canonical((*op.first.dims[place], Factor(repeats))))]


def _repeat(op: Operation) -> list[Dims]:
    added = op.result.dim() - len(op.first.dims)
    found: list[Dim] = [(Factor(size),) for size in op.result.shape[:added]]
    for dim, size in zip(op.first.dims, op.result.shape[added:], strict=True):
        if is_sharded(dim) and length(dim) != size:
            raise ShardingError("repeat of a sharded dim")
        found.append(dim if is_sharded(dim) else (Factor(size),))
    return [tuple(found)]


def _copy_into(op: Operation) -> list[Dims]:
    """dst.copy_(src): dst holds what src held."""
    return [_broadcast(replace(op, operands=op.operands[1:]), op.result.shape)]


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
    _expand: ("expand",),
    _parts_along: ("split", "split_with_sizes", "slice", "select", "unbind"),
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
    _repeat: ("repeat",),
    _copy_into: ("copy_",),
}  # fmt: skip

RULES: Mapping[str, Rule] = {name: rule for rule, names in _RULES.items() for name in names}
"""Rule of each operation, by its name in torch.ops.aten; elementwise ones are known by their tag."""


def rule_of(func: Any) -> Rule | None:
    """The rule of an operation, if it has one."""
    name = func.overloadpacket.__name__
    if name in RULES:
        return RULES[name]
    return _elementwise if torch.Tag.pointwise in func.tags else None


def arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operation's schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
