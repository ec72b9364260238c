"""`ShardedTensor`: a tensor of which each rank holds some entries, and which scripts see as the whole one.

Optimizers and clipping of plain scripts read `shape` and `ndim`, take norms, and update values. Here these
are those of the whole tensor, while the memory is that of this rank's entries:

    function                          what happens
    elementwise: add, lerp_, sqrt     on this rank's entries; the result is sharded alike
    sums and norms over all entries   of this rank's entries, then one all-reduce
    everything else: matmul, view     on the whole tensor, all-gathered: every rank calls it

What changes its first argument then keeps this rank's entries of the result. So an optimizer that updates
each entry by itself communicates nothing; LARS and LAMB all-reduce their norms, and Muon gathers the
matrices that it orthogonalises, without a line of code for any of them.

Note [Why not DTensor]
    torch's DTensor shards along a dimension of the tensor, and needs torch.distributed. Here a shard is a
    range of the entries of a group's flat memory, which is gathered and reduced without a copy, and ranks
    may be threads. What a script sees is the same: `shape`, `ndim`, norms and values of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis, axis_names
from weft.errors import Fault, PlanError
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.parallel.zero.tensor_functions import (
    changes_first_argument,
    is_elementwise,
    is_local_read,
)


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that hold the entries of a tensor.

    Attributes:
        axis: the mesh axes over which entries are sharded.
        norm_axes: further axes along which ranks hold other entries of the same parameter, such as
            those of a tensor-parallel layer: sums and norms are taken over them, too.
    """

    comm: Comm
    axis: Axis
    norm_axes: tuple[str, ...] = ()

    def total(self, partial: Tensor) -> Tensor:
        """The sum over all ranks of a scalar; its gradient is that of this rank's part."""
        axes = (*axis_names(self.axis), *self.norm_axes)
        with torch.no_grad():
            total = self.comm.all_reduce(partial.detach().contiguous(), axes)
        return partial - partial.detach() + total if partial.requires_grad else total


@dataclass(frozen=True)
class Entries:
    """Which entries of a tensor a rank holds: `starts[index]` to `starts[index + 1]`, counted row by row.

    Attributes:
        shape: of the whole tensor.
        starts: of the entries of each rank, and the number of all entries.
        index: of this rank.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    index: int

    @property
    def own(self) -> slice:
        """The entries of this rank."""
        return slice(self.starts[self.index], self.starts[self.index + 1])

    @property
    def sizes(self) -> list[int]:
        """The numbers of entries of the ranks."""
        return [stop - start for start, stop in zip(self.starts, self.starts[1:], strict=False)]


class ShardedTensor(Tensor):
    """This rank's entries of a tensor, one-dimensional in memory, with the shape of the whole tensor.

    Made by the wrappers; results of elementwise functions are sharded alike, other results are plain
    tensors, equal on every rank.

    Raises:
        PlanError: what would write into a gathered copy, such as `param.view(-1).zero_()`.
    """

    entries: Entries
    group: ShardGroup | None

    @staticmethod
    def of(local: Tensor, entries: Entries, group: ShardGroup | None) -> ShardedTensor:
        """The tensor of which `local[n]` are this rank's entries, in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            sharded = local.as_subclass(ShardedTensor)
        sharded.entries = entries
        sharded.group = group
        return sharded

    @property
    def local(self) -> Tensor:
        """This rank's entries, one-dimensional, in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """The whole tensor, in new memory; a collective. Its gradient is that of this rank's entries."""
        whole: Tensor = _Gather.apply(self.local, self)  # type: ignore[no-untyped-call]
        return whole

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the whole tensor."""
        return torch.Size(self.entries.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Of the whole tensor."""
        return len(self.entries.shape)

    def dim(self) -> int:
        """Of the whole tensor."""
        return len(self.entries.shape)

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Entries of the whole tensor."""
        return self.entries.starts[-1]

    nelement = numel

    def __len__(self) -> int:
        return self.entries.shape[0]

    def __repr__(self, **_: Any) -> str:
        own = self.entries.own
        return (
            f"ShardedTensor(shape={list(self.shape)}, dtype={self.dtype}, "
            f"entries {own.start} to {own.stop} of {self.numel()} on this rank)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = ShardedTensor.of(self.local.detach().clone(), self.entries, self.group)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self.local.detach(), self.entries.shape, self.entries.starts, self.entries.index)
        return _load_shard, state

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        special = SPECIAL.get(func)
        if special is not None:
            result = special(args, options)
            if result is not NotImplemented:
                return result
        if is_local_read(func):
            return _plain(func, args, options)
        if is_elementwise(func):
            result = _elementwise(func, args, options)
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, options)


class _Gather(torch.autograd.Function):
    """This rank's entries -> the whole tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharded: ShardedTensor) -> Tensor:
        ctx.own = sharded.entries.own
        group = _group_of([sharded])
        whole = group.comm.all_gather(local.contiguous(), group.axis, sizes=sharded.entries.sizes)
        return whole.view(sharded.entries.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.reshape(-1)[ctx.own], None


class GatheredCopy(Tensor):
    """A view of a gathered copy of a sharded tensor: writes to it are an error, as they would be lost."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        copies = [each for each in tensors_in((args, options)) if isinstance(each, GatheredCopy)]
        with torch._C.DisableTorchFunctionSubclass():
            versions = [each._version for each in copies]
            result = func(*args, **options)
            is_written = [each._version for each in copies] != versions
        if is_written:
            fault = Fault(
                "a sharded parameter",
                f"{func.__name__} writes into a view of a gathered copy, so the values would be lost",
                fix="change the parameter itself: param[...] = value, param.copy_(values), param.mul_(mask)",
            )
            raise PlanError(fault)
        return _mark_views(result, copies)


def _plain(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The function on the memory of this rank."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **options)


def _shards_in(tree: Any) -> list[ShardedTensor]:
    return [tensor for tensor in tensors_in(tree) if isinstance(tensor, ShardedTensor)]


def _group_of(shards: Iterable[ShardedTensor]) -> ShardGroup:
    for shard in shards:
        if shard.group is not None:
            return shard.group
    fault = Fault(
        "a sharded tensor",
        "was loaded from a file, so it belongs to no group of ranks yet",
        fix="load it into the optimizer or the wrapped module that it was saved of",
    )
    raise PlanError(fault)


def _elementwise(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The function on this rank's entries; NotImplemented where arguments are not sharded alike."""
    if func.__name__.startswith(("_foreach_", "_fused_")):
        return _elementwise_lists(func, args, options)
    shards = _shards_in((args, options))
    entries = shards[0].entries
    if any(shard.entries != entries for shard in shards):
        return NotImplemented
    is_in_place = changes_first_argument(func)
    if is_in_place and not isinstance(args[0], ShardedTensor):
        return NotImplemented
    own: list[Any] = []
    for arg in args:
        part = _own_part(arg, entries)
        if part is NotImplemented:
            return NotImplemented
        own.append(part)
    own_options: dict[str, Any] = {}
    for key, option in options.items():
        part = _own_part(option, entries)
        if part is NotImplemented or key == "out":
            return NotImplemented
        own_options[key] = part
    result = _plain(func, own, own_options)
    if is_in_place:
        return args[0]
    group = next((shard.group for shard in shards if shard.group is not None), None)
    return map_leaves(result, Tensor, lambda local: ShardedTensor.of(local, entries, group))


def _own_part(value: Any, entries: Entries) -> Any:
    """This rank's part of an argument: scalars as they are, of whole tensors the own entries.

    NotImplemented for tensors of other shapes.
    """
    if not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
        return value
    if value.dim() == 0:
        return value
    if value.dim() > len(entries.shape):
        return NotImplemented
    try:
        whole = value.expand(entries.shape)
    except RuntimeError:
        return NotImplemented
    return whole.reshape(-1)[entries.own]


def _elementwise_lists(
    func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> Any:
    """A function of lists of tensors, of which each list has one for each parameter.

    NotImplemented where a list has whole tensors.
    """
    lists = [arg for arg in (*args, *options.values()) if isinstance(arg, (list, tuple))]
    first = next(each for each in lists if _shards_in(each))
    for each in lists:
        for tensor, shard in zip(each, first, strict=False):
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                continue
            if _entries_of(tensor) != _entries_of(shard):
                if func.__name__.startswith("_fused_"):
                    _reject_mixed_states()
                return NotImplemented
    result = _plain(func, args, options)
    if not isinstance(result, (list, tuple)):
        return result
    return [
        ShardedTensor.of(local, shard.entries, shard.group)
        if isinstance(shard, ShardedTensor)
        else local
        for local, shard in zip(result, first, strict=True)
    ]


def _reject_mixed_states() -> None:
    """Raise PlanError: one kernel would update states of whole tensors by gradients of shards."""
    fault = Fault(
        "optimizer",
        "has states of the whole parameters, from steps before the module was wrapped",
        fix="fused=False, or make the optimizer after wrapping",
    )
    raise PlanError(fault)


def _entries_of(tensor: Tensor) -> Entries | None:
    return tensor.entries if isinstance(tensor, ShardedTensor) else None


def _on_whole(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The function on gathered tensors. Into which of them it has written is seen by their versions: their
    own entries are kept.
    """
    gathered: dict[int, tuple[ShardedTensor, Tensor]] = {}

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShardedTensor):
            return tensor
        if id(tensor) not in gathered:
            gathered[id(tensor)] = (tensor, tensor.full_tensor())
        _, copied = gathered[id(tensor)]
        return copied

    whole_args = map_leaves(tuple(args), Tensor, whole)
    whole_options = map_leaves(options, Tensor, whole)
    result = _plain(func, whole_args, whole_options)
    shard_of: dict[int, ShardedTensor] = {}
    for shard, copied in gathered.values():
        if copied._version:  # the function has written into it
            with torch.no_grad():
                shard.local.copy_(copied.reshape(-1)[shard.entries.own])
            shard_of[id(copied)] = shard
    result = map_leaves(result, Tensor, lambda tensor: shard_of.get(id(tensor), tensor))
    return _mark_views(result, [copied for _, copied in gathered.values()])


def _mark_views(result: Any, sources: Sequence[Tensor]) -> Any:
    """Tensors of the result that share memory with a gathered copy, as `GatheredCopy`."""

    def marked(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor) or tensor.layout != torch.strided:
            return tensor
        shares = tensor.untyped_storage().data_ptr() in memory
        return tensor.as_subclass(GatheredCopy) if shares else tensor

    with torch._C.DisableTorchFunctionSubclass():
        memory = {each.untyped_storage().data_ptr() for each in sources if each.numel() > 0}
        return map_leaves(result, Tensor, marked)


# sums and norms over all entries


def _sum(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`torch.sum` over all entries."""
    if len(args) > 1 or set(options) - {"dtype"}:
        return NotImplemented
    (shard,) = args
    partial = torch.sum(shard.local, **options)
    return _group_of([shard]).total(partial)


def _mean(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`torch.mean` over all entries; of a tensor-parallel parameter, those of all its ranks."""
    if len(args) > 1 or options:
        return NotImplemented
    (shard,) = args
    counted = torch.stack([shard.local.sum(), shard.local.new_tensor(len(shard.local))])
    total, count = _group_of([shard]).total(counted).unbind()
    return total / count


def _norm(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The norm over all entries: `vector_norm(x, ord)`, `x.norm(p)` and their like."""
    shard, *positional = args
    given = dict(zip(("ord", "dim", "keepdim", "dtype"), positional, strict=False))
    given.update({"ord" if key == "p" else key: option for key, option in options.items()})
    order = given.pop("ord", None)
    is_plain = (
        isinstance(shard, ShardedTensor) and given.get("dim") is None and not given.get("keepdim")
    )
    if not is_plain or (order == "nuc") or given.get("out") is not None:
        return NotImplemented
    if order in ("fro", None):
        order = 2.0
    dtype = given.get("dtype")
    local = shard.local if dtype is None else shard.local.to(dtype)
    return _norm_of(_group_of([shard]), local, float(order))


def _matrix_norm(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`torch.linalg.norm`, which with an order takes the spectral and other norms of matrices."""
    order = args[1] if len(args) > 1 else options.get("ord")
    has_matrix_norm = order is not None and args[0].ndim > 1
    return NotImplemented if has_matrix_norm else _norm(args, options)


def _norm_of(group: ShardGroup, local: Tensor, order: float) -> Tensor:
    """The norm of the entries of all ranks."""
    if order in (float("inf"), float("-inf")):
        largest = order > 0
        if local.numel():
            partial = local.abs().max() if largest else local.abs().min()
        else:  # the other ranks hold all entries
            partial = local.new_tensor(0.0 if largest else float("inf"))
        axes = (*axis_names(group.axis), *group.norm_axes)
        return group.comm.all_reduce(partial.detach(), axes, op="max" if largest else "min")
    if order == 0:
        return group.total((local != 0).sum().to(local.dtype))
    powers = torch.linalg.vector_norm(local, order).pow(order)
    return group.total(powers).pow(1 / order)


def _foreach_norm(args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensors, *rest = args
    return [torch.linalg.vector_norm(tensor, *rest, **options) for tensor in tensors]


def _check_finite(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What torch.amp.GradScaler calls: all ranks find an entry that is not finite, or none does."""
    gradients, found, scale = args
    _plain(torch._amp_foreach_non_finite_check_and_unscale_, (gradients, found, scale), options)
    # a dict, not a set: every rank starts its collectives in the same order
    groups = dict.fromkeys(_group_of([shard]) for shard in _shards_in(gradients))
    for group in groups:
        axes = (*axis_names(group.axis), *group.norm_axes)
        group.comm.all_reduce_(found, axes, op="max")
    return None


# values


def _copy(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`param.copy_(values)`: of the whole tensor, or sharded alike."""
    target, source, *_ = args
    if not isinstance(target, ShardedTensor):
        return NotImplemented
    if isinstance(source, ShardedTensor) and source.entries != target.entries:
        if source.group is None and target.group is not None:
            _reject_other_shard(source, target)
        source = source.full_tensor()
    part = _own_part(source, target.entries)
    if part is NotImplemented:
        raise RuntimeError(
            f"a tensor of shape {list(source.shape)} cannot be copied into one of shape {list(target.shape)}"
        )
    target.local.copy_(part.local if isinstance(part, ShardedTensor) else part)
    return target


def _reject_other_shard(source: ShardedTensor, target: ShardedTensor) -> None:
    got, need = source.entries, target.entries
    fault = Fault(
        "a sharded tensor",
        "was saved by another rank, or on another number of ranks",
        got=f"part {got.index + 1} of {len(got.sizes)} of shape {list(got.shape)}",
        need=f"part {need.index + 1} of {len(need.sizes)} of shape {list(need.shape)}",
        fix="full_state_dict() loads on any number of ranks",
    )
    raise PlanError(fault)


def _like(func: Callable[..., Any]) -> Callable[..., Any]:
    def make(args: Sequence[Any], options: dict[str, Any]) -> Any:
        shard, *rest = args
        if not isinstance(shard, ShardedTensor):
            return NotImplemented
        options.pop("memory_format", None)
        requires_grad = options.pop("requires_grad", False)
        local = _plain(func, (shard.local, *rest), options)
        made = ShardedTensor.of(local, shard.entries, shard.group)
        return made.requires_grad_() if requires_grad else made

    return make


def _get_data(args: Sequence[Any], options: dict[str, Any]) -> Any:
    (shard,) = args
    return shard.detach()  # shares the version counter, so that writes are seen


def _set_data(args: Sequence[Any], options: dict[str, Any]) -> Any:
    shard, values = args
    part = _own_part(values, shard.entries)
    if part is NotImplemented:
        raise RuntimeError(f"data of shape {list(values.shape)} for shape {list(shard.shape)}")
    plain = part.local if isinstance(part, ShardedTensor) else part.clone()
    _plain(Tensor.data.__set__, (shard, plain), {})  # type: ignore[attr-defined]


def _set_grad(args: Sequence[Any], options: dict[str, Any]) -> Any:
    shard, gradient = args
    if gradient is not None and not isinstance(gradient, ShardedTensor):
        part = _own_part(gradient, shard.entries)
        if part is NotImplemented:
            raise RuntimeError(
                f"a gradient of shape {list(gradient.shape)} for {list(shard.shape)}"
            )
        gradient = ShardedTensor.of(part, shard.entries, shard.group)
    _plain(Tensor.grad.__set__, (shard, gradient), {})  # type: ignore[attr-defined]


SPECIAL: dict[Any, Callable[[Sequence[Any], dict[str, Any]], Any]] = {
    torch.sum: _sum,
    Tensor.sum: _sum,
    torch.mean: _mean,
    Tensor.mean: _mean,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch.linalg.norm: _matrix_norm,
    torch.linalg.vector_norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_finite,
    Tensor.copy_: _copy,
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.grad.__set__: _set_grad,  # type: ignore[attr-defined]
    torch.zeros_like: _like(torch.zeros_like),
    torch.ones_like: _like(torch.ones_like),
    torch.empty_like: _like(torch.empty_like),
    torch.full_like: _like(torch.full_like),
}
"""Functions that are neither elementwise nor taken of the whole tensor."""


def _load_shard(
    local: Tensor,
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    index: int,
) -> ShardedTensor:
    return ShardedTensor.of(local, Entries(tuple(shape), tuple(starts), index), None)


torch.serialization.add_safe_globals([_load_shard])
