"""Which dims of an operation's output are sharded, from those of its inputs: one rule per torch operation.

An operation that mixes entries along a sharded dim (a softmax, a slice, a product that sums over
it) computes something else on a shard than on the whole tensor: its rule raises `ShardingError`, as
does an operation without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    canonical,
    is_repeated,
    is_sharded,
    length,
    regroup,
    with_dim,
)


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


def _broadcast(
    name: str,
    operands: Sequence[Dims],
    shape: tuple[int, ...],
) -> Dims:
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
            found.append(canonical(sharded[0]))
        else:
            found.append((DimFactor(shape[place], repeated=not whole),))
    return tuple(found)


def _view(op: TracedOp) -> list[Dims]:
    return [
        regroup(
            op.dims,
            op.shape,
            inferred=_inferred_dim(op),
            name=op.name,
        )
    ]


def _inferred_dim(op: TracedOp) -> int | None:
    """The output dim whose size was written as -1."""
    for key in ("sizes", "size", "shape"):
        written = op.args.get(key)
        if isinstance(written, (tuple, list)) and -1 in written:
            offset = op.place() if op.name == "unflatten" else 0
            return offset + list(written).index(-1)
    return None


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
    kept: list[Dim] = []
    for place, dim in enumerate(op.dims):
        if place not in gone:
            kept.append(dim)
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
    return [with_dim(op.dims, place)] * len(op.outputs)


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
    return [with_dim(op.dims, place, (DimFactor(size, sharded),)) for size in sizes]


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
    one: Dim = (DimFactor(1),)
    along: list[Dim] = []
    others: list[Dims] = []
    for operand in op.operands:
        if len(operand.dims) == num_dims:
            along.append(operand.dims[place])
            others.append(with_dim(operand.dims, place, one))
    shape = list(op.shape)
    shape[place] = 1
    dims = _broadcast(op.name, others, tuple(shape))
    sharded = [is_sharded(dim) for dim in along]
    if not any(sharded):
        return [with_dim(dims, place, (DimFactor(op.shape[place]),))]
    if not all(sharded):
        raise ShardingError("cat of a sharded dim and a whole one")
    parts = tuple(length(dim) for dim in along)
    stacked = DimFactor(sum(parts), sharded=True, parts=parts)
    return [with_dim(dims, place, (stacked,))]


def _stack(op: TracedOp) -> list[Dims]:
    num_dims = len(op.shape)
    place = op.args.get("dim", 0) % num_dims
    inner_shape = (*op.shape[:place], *op.shape[place + 1 :])
    operands = [operand.dims for operand in op.operands]
    inner = _broadcast(op.name, operands, inner_shape)
    num_stacked = op.shape[place]
    dims = list(inner)
    dims.insert(place, (DimFactor(num_stacked),))
    return [tuple(dims)]


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
    *_, left, right = op.operands
    *left_batch, rows, left_inner = left.dims
    *right_batch, right_inner, columns = right.dims
    _refuse_contraction(op, left_inner, right_inner)
    for left_dim, right_dim in zip(left_batch, right_batch, strict=True):
        if is_sharded(left_dim) != is_sharded(right_dim):
            raise ShardingError(f"{op.name} of a sharded batch dim with a whole one")
    return [(*left_batch, rows, columns)]


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
    num_dims = len(dims)
    if written is None or written == []:
        return list(range(num_dims))
    several = written if isinstance(written, (tuple, list)) else [written]
    return [place % num_dims for place in several]


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
    return [with_dim(op.dims, place, index[0])]


def _pad(op: TracedOp) -> list[Dims]:
    last = len(op.dims) - 1
    padded = {last - index // 2 for index, size in enumerate(op.args["pad"]) if size}
    _refuse_sharded(op, padded)
    dims = op.dims
    for place in padded:
        dims = with_dim(dims, place, (DimFactor(op.shape[place]),))
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
    k_heads = k[1]
    has_one_kv_head = length(k_heads) == 1 and not is_sharded(k_heads)
    sharded_heads = [is_sharded(dims[1]) for dims in (q, k, v)]
    are_alike = len(set(sharded_heads)) == 1
    if not are_alike and not has_one_kv_head:
        raise ShardingError("attention of sharded heads with whole ones")
    return [(*q[:-1], v[-1])]


def _repeat_interleave(op: TracedOp) -> list[Dims]:
    if op.args.get("dim") is None:
        raise ShardingError("repeat_interleave of a flattened sharded tensor")
    place = op.place()
    dim = op.dims[place]
    repeats = op.shape[place] // length(dim)
    repeated = canonical((*dim, DimFactor(repeats)))
    return [with_dim(op.dims, place, repeated)]


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


def arguments(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments by their names in the operation's schema."""
    by_name: dict[str, Any] = {}
    for argument, value in zip(func._schema.arguments, args, strict=False):
        by_name[argument.name] = value
    by_name.update(kwargs)
    return by_name
