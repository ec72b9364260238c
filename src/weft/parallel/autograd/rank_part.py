"""`RankPart`: a parameter of a tensor-parallel layer in a plain script, its gradient or a state of its optimizer.

Other ranks hold the other entries. Norms, sums and loss scaling of torch are taken over all of them; what optimizers
compute of several entries in another way is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from weft.comm.transport import Reduce
from weft.errors import Fault, PlanError
from weft.parallel.autograd.holders import Holders, holders_of
from weft.parallel.autograd.tensor_functions import (
    changes_first_argument,
    in_type_of,
    in_wide_type,
    is_elementwise,
    is_local_read,
    is_statistic,
    take_in_lists,
)
from weft.parallel.autograd.tree import map_leaves, tensors_in

FOREACH_NORM = torch._foreach_norm
NORMS = frozenset(
    {FOREACH_NORM, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}
)
MEANS = frozenset({torch.mean, Tensor.mean})
REDUCTIONS: Mapping[Any, Reduce] = {
    **dict.fromkeys((torch.sum, Tensor.sum, *MEANS), "sum"),
    **dict.fromkeys((torch.count_nonzero, Tensor.count_nonzero), "sum"),
    **dict.fromkeys((torch.max, Tensor.max, torch.amax, Tensor.amax), "max"),
    **dict.fromkeys((torch.min, Tensor.min, torch.amin, Tensor.amin), "min"),
    **dict.fromkeys((torch.any, Tensor.any), "max"),
    **dict.fromkeys((torch.all, Tensor.all), "min"),
}
"""Reduction of a tensor to one entry -> how those of the ranks are combined."""
DATA = cast("Any", Tensor).data.__get__
GRADIENT = cast("Any", Tensor).grad.__get__
NEW = frozenset({Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty})
FINITE_CHECK = torch._amp_foreach_non_finite_check_and_unscale_
"""What torch.amp.GradScaler calls: whether an entry is not finite, for the tensors it gets."""


class FunctionKind(Enum):
    """What a function does with parts."""

    NORM = auto()
    REDUCTION = auto()
    GRADIENT = auto()
    STATISTIC = auto()  # of several entries, as a product
    READ = auto()  # of no values, or by a layer
    UPDATE = auto()  # of each entry of the first argument
    ENTRIES = auto()  # of each entry, in new memory
    OTHER = auto()


class Form(Enum):
    """Which entries of a parameter a part has."""

    PARAM = auto()  # all of this rank, in the dims of the parameter
    VIEW = auto()  # all of this rank, in other dims
    MIXED = auto()  # some of them, or of several parameters


@cache
def _kind_of(func: Callable[..., Any]) -> FunctionKind:
    """What a function does with parts: called for each call of an optimizer."""
    if isinstance(func, torch._ops.OperatorBase):
        return FunctionKind.READ  # a compiled layer computes with the parameter itself
    if func in NORMS:
        return FunctionKind.NORM
    if func in REDUCTIONS:
        return FunctionKind.REDUCTION
    if func == GRADIENT:
        return FunctionKind.GRADIENT
    if is_statistic(func):
        return FunctionKind.STATISTIC
    if is_local_read(func):
        return FunctionKind.OTHER if func == DATA else FunctionKind.READ
    if is_elementwise(func) and func is not FINITE_CHECK:
        return FunctionKind.UPDATE if changes_first_argument(func) else FunctionKind.ENTRIES
    is_new = func.__name__.endswith("_like") or func in NEW
    return FunctionKind.ENTRIES if is_new else FunctionKind.OTHER


class RankPart(Tensor):
    """A parameter of a tensor-parallel layer, its gradient or a state of it: other ranks hold other entries
    (`holders`). Or a gradient whose parameters' neighbours other ranks hold (None).

    Layers compute with `plain(param)`. Norms, sums and means over all entries are those of the whole tensor,
    and loss scaling looks at all ranks; shapes, and everything else, are those of this rank's part. Without a
    graph, as in the step of an optimizer, what is computed of a part entry by entry, or is a view of one, is
    a part, too.

    Raises:
        PlanError: by products, decompositions and statistics of rows that an optimizer computes of a part;
            by torch's norms and loss scaling where neighbours are on other ranks: each call sees the
            gradients of this rank's stages alone, and they would be taken for all.
    """

    holders: Holders | None = None
    form: Form = Form.PARAM

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        kind = _kind_of(func)
        if kind is FunctionKind.NORM:
            return _norms(func, args, dict(options))
        if kind is FunctionKind.REDUCTION:
            return _reduced(func, args, options)
        if kind is FunctionKind.GRADIENT:
            return _gradient_of(args[0])
        if kind is FunctionKind.STATISTIC:
            _reject_statistics(func, (args, options))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **options)
        if kind is FunctionKind.READ:
            return result
        if kind is FunctionKind.UPDATE:
            if not isinstance(args[0], RankPart):  # a list of states, or one that is not marked yet
                _adopt_states(args)
            return result
        if func is FINITE_CHECK:
            _agree_on_finite(args[0], found=args[1])
        return _marked(args, result, is_alike=kind is FunctionKind.ENTRIES)

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> NoReturn:
        """Called by torch.distributed.checkpoint, which would store this rank's part as the whole."""
        reject_distributed_checkpoint(fqn)

    def __create_chunk_list__(self) -> NoReturn:
        """Called by torch.distributed.checkpoint."""
        reject_distributed_checkpoint("a sharded weight")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = plain(self.detach()).clone()
        if isinstance(self, nn.Parameter):
            param = nn.Parameter(copied, requires_grad=self.requires_grad)
            copied = param if self.holders is None else part_param(param, self.holders)
            copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have plain tensors."""
        values = plain(self.detach())
        if isinstance(self, nn.Parameter):
            return nn.Parameter(values, requires_grad=self.requires_grad).__reduce_ex__(protocol)
        return values.__reduce_ex__(protocol)


def plain(tensor: Tensor) -> Tensor:
    """The same memory as a plain tensor, that layers compute with; autograd passes through."""
    if not isinstance(tensor, RankPart):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.view_as(tensor)  # compilers do not trace `as_subclass`


def part_of(tensor: Tensor, holders: Holders | None, form: Form = Form.PARAM) -> RankPart:
    """The same memory as a `RankPart`."""
    with torch._C.DisableTorchFunctionSubclass():
        part = tensor.as_subclass(RankPart)
    part.holders = holders
    part.form = form
    return part


def _gradient_of(param: RankPart) -> Tensor | None:
    """The gradient, which autograd or a wrapper has left as a plain tensor, as a part of the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = param.grad
        if gradient is not None and param.holders is not None and type(gradient) is Tensor:
            gradient = part_of(gradient, param.holders)
            param.grad = gradient
    return gradient


def _marked(args: Sequence[Any], result: Any, *, is_alike: bool) -> Any:
    """The result of a function of parts: a part, too, where it has no graph, and was computed entry by entry
    (`is_alike`) or is in the same memory.
    """
    if is_alike and isinstance(result, (tuple, list)):  # of lists, one tensor for each parameter
        return [
            _marked(of, each, is_alike=True)
            for *of, each in zip(*_lists(args), result, strict=True)
        ]
    source = next((each for each in tensors_in(args) if isinstance(each, RankPart)), None)
    if source is None or source.holders is None:
        return result

    def mark(tensor: Tensor) -> Tensor:
        has_graph = tensor.requires_grad and torch.is_grad_enabled()  # views require it without one
        if isinstance(tensor, RankPart) or has_graph or tensor.dim() == 0:
            return tensor
        has_shape = tensor.shape == source.shape
        if is_alike:
            return part_of(tensor, source.holders, source.form) if has_shape else tensor
        if tensor.untyped_storage()._cdata != source.untyped_storage()._cdata:
            is_joined = bool(_lists(args)) and tensor.is_floating_point()
            return part_of(tensor, source.holders, Form.MIXED) if is_joined else tensor
        if source.form is Form.MIXED or tensor.numel() != source.numel():
            return part_of(tensor, source.holders, Form.MIXED)
        is_same = has_shape and tensor.stride() == source.stride()
        return part_of(tensor, source.holders, source.form if is_same else Form.VIEW)

    with torch._C.DisableTorchFunctionSubclass():
        return map_leaves(result, Tensor, mark)


def _lists(args: Sequence[Any]) -> list[Sequence[Any]]:
    return [each for each in args if isinstance(each, (tuple, list))]


def _adopt_states(args: Sequence[Any]) -> None:
    """Make states of an optimizer parts, in place, where it has added a part of their shape: those that were
    loaded from a file, or made as `torch.zeros(param.shape)`.
    """
    states, *others = _lists(args) or [[each] for each in args]
    for other in others:
        for state, source in zip(states, other, strict=False):
            if type(state) is Tensor and isinstance(source, RankPart) and not state.requires_grad:
                with torch._C.DisableTorchFunctionSubclass():
                    has_shape = state.shape == source.shape
                if has_shape and source.holders is not None:
                    state.__class__ = RankPart  # the optimizer holds this object
                    cast("RankPart", state).holders = source.holders
                    cast("RankPart", state).form = source.form


def _norms(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The norm over the ranks that hold the entries, of a part or of each of several."""
    given, *rest = args
    order = rest.pop(0) if rest else options.pop("ord", options.pop("p", None))
    has_order = order not in ("fro", None)
    if order == "nuc":
        _reject_statistics(func, given)
    order = 2.0 if order in (None, "fro") else float(order)
    dims = rest[0] if rest else options.get("dim")
    is_of_matrix = func is torch.linalg.norm and has_order
    keeps_dims = bool(rest[1] if len(rest) > 1 else options.get("keepdim"))
    parts = list(given) if func is FOREACH_NORM else [given]
    norms: list[Tensor] = []
    for part in parts:
        holders = holders_of_gradient(part, "torch takes the norm of this rank's part alone")
        dtype = options.get("dtype")
        with torch._C.DisableTorchFunctionSubclass():
            local = torch.linalg.vector_norm(in_wide_type(part), order, *rest, **options)
        if holders is not None and _is_reduced(part, dims):
            is_row = keeps_dims or (part.form is Form.VIEW and _names_dims(dims))
            if is_row or part.form is Form.MIXED or (is_of_matrix and part.dim() > 1):
                _reject(func, holders)  # what keeps dims goes on to the mean of a row
            local = _norm_over(holders, local, order)
        norms.append(local if dtype else in_type_of(part, local))
    return norms if func is FOREACH_NORM else norms[0]


def _reduced(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A sum, mean or extreme over the ranks that hold the entries; with a graph that of this rank's part,
    whose gradients are those of its entries. Rejected for some dims, where ranks share them.
    """
    part, *rest = args
    named = (options[key] for key in ("dim", "axis", "other") if key in options)
    dims = rest[0] if rest else next(named, None)
    if not isinstance(part, RankPart) or isinstance(dims, Tensor):  # the larger of two entries
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **options)
        return _marked(args, result, is_alike=True)
    values, holders = plain(part), part.holders
    if holders is None or not _is_reduced(part, dims):
        return func(values, *rest, **options)
    if _names_dims(dims) or part.form is Form.MIXED:
        _reject(func, holders)
    op = REDUCTIONS[func]
    if op in ("max", "min") and not values.numel():
        bound = float("-inf") if op == "max" else float("inf")
        values = torch.nan_to_num(values.new_full((1,), bound))  # no entry is below, or above
    wide = in_wide_type(values)
    local: Tensor = func(wide, *rest, **options)
    if local.requires_grad:
        return func(values, *rest, **options)
    if func in MEANS:
        counted = torch.stack([wide.sum(dtype=local.dtype), local.new_tensor(wide.numel())])
        total, count = holders.comm.all_reduce(counted, holders.axes).unbind()
        return total / count if "dtype" in options else in_type_of(values, total / count)
    if local.dtype != torch.bool:
        total = holders.comm.all_reduce(local, holders.axes, op=op)
        is_given = "dtype" in options or not total.is_floating_point()
        return total if is_given else in_type_of(values, total)
    return holders.comm.all_reduce(local.int(), holders.axes, op=op).bool()


def _names_dims(dims: Any) -> bool:
    return dims is not None and dims not in ((), [])


def _is_reduced(part: RankPart, dims: Any) -> bool:
    """Whether a reduction over `dims`, a number or several, or over all (None, or none named), is taken over
    the dim of which ranks hold parts. Of views this is not known, and said of all dims.
    """
    if part.holders is None:
        return False
    if not _names_dims(dims) or part.form is not Form.PARAM:
        return True
    several = dims if isinstance(dims, (tuple, list)) else (dims,)
    return any(each % part.dim() == part.holders.dim for each in several)


def _reject_statistics(func: Callable[..., Any], tree: Any) -> None:
    """Raise PlanError where parts are multiplied by parts or decomposed, or statistics of one are taken: a
    layer of the script's own multiplies a part by activations.
    """
    held = [holders_of(each) for each in tensors_in(tree) if each.dim() > 0]
    if held and held[0] is not None and None not in held:
        _reject(func, held[0])


def _reject(func: Callable[..., Any], holders: Holders) -> NoReturn:
    name = getattr(func, "__name__", "a function").strip("_")
    raise PlanError(
        Fault(
            "a sharded weight",
            f"{name} of a weight of which each rank along {', '.join(holders.axes)} has a part is not that of the "
            f"whole weight",
            need="entries by themselves, or norms and sums of all",
            fix="for an optimizer weft.ShardedOptimizer(net.parameters(), torch.optim.Adafactor, comm), which sees "
            "whole weights (with DistributedDataParallel, not FullyShardedDataParallel); for a log of this rank's "
            "part p.detach().as_subclass(torch.Tensor)",
        )
    )


def reject_distributed_checkpoint(name: str) -> NoReturn:
    """Raise PlanError for a parameter of a tensor-parallel layer in a file of torch.distributed.checkpoint."""
    fault = Fault(
        name,
        "is of a tensor-parallel layer, whose parts torch.distributed.checkpoint would take for whole weights",
        fix="weft.save(folder, net, optimizer) and weft.load, on any layout",
    )
    raise PlanError(fault)


def _norm_over(holders: Holders, local: Tensor, order: float) -> Tensor:
    """The norm of a vector of which each rank has the norm of its part; autograd passes to this part."""
    if abs(order) == float("inf"):
        op: Reduce = "max" if order > 0 else "min"
        total = holders.comm.all_reduce(local.detach(), holders.axes, op=op)
        return torch.where(local == total, local, total)
    powers = local if order == 0 else local.pow(order)
    total = holders.comm.all_reduce(powers.detach(), holders.axes)
    if powers.requires_grad:
        total = powers - powers.detach() + total
    return total if order == 0 else total.pow(1 / order)


def _agree_on_finite(gradients: Iterable[Tensor], *, found: Tensor) -> None:
    """Have every rank find an entry that is not finite where one of them has."""
    held = [
        holders_of_gradient(each, "torch.amp.GradScaler checks this rank's part alone")
        for each in gradients
    ]
    groups = dict.fromkeys((each.comm, each.axes) for each in held if each is not None)
    for comm, axes in groups:
        comm.all_reduce_(found, axes, op="max")


def holders_of_gradient(gradient: Tensor, what: str) -> Holders | None:
    """Those of a `RankPart`; None of a plain gradient.

    Raises:
        PlanError: other ranks hold the gradients of other stages.
    """
    if not isinstance(gradient, RankPart):
        return None
    if gradient.holders is None:
        fault = Fault(
            "gradients",
            f"{what}, and other ranks hold the gradients of other stages",
            fix="clip_grad_norm_(max_norm) of the pipeline, which takes the norm over all ranks; in place of a "
            "loss scale bfloat16, which needs none",
        )
        raise PlanError(fault)
    return gradient.holders


class MarkedLayer(nn.Module):
    """A layer of whose parameters other ranks hold other entries."""

    def mark(self, names: Sequence[str], holders: Holders) -> None:
        """Make its parameters of these names parts that `holders` hold."""
        if holders.comm.degree(holders.axes) == 1:
            return
        for name in names:
            param = getattr(self, name)
            if param is not None:
                self.register_parameter(name, part_param(param, holders))


def part_param(param: nn.Parameter, holders: Holders) -> nn.Parameter:
    """A parameter of the same memory that is a `RankPart`, as its gradients are."""
    # no view of the other, as `as_subclass` would be: compilers look for the base of views
    part: Any = Tensor._make_subclass(RankPart, param.detach(), param.requires_grad)
    part.holders = holders
    part._is_param = True
    return cast("nn.Parameter", part)


take_in_lists(RankPart)
