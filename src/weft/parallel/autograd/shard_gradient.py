"""Gradients of which a rank holds a part, for plain scripts: torch's norms and loss scaling are taken over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import span
from weft.core.mesh import Axis, axis_names
from weft.errors import Fault, PlanError

HOLDERS = "_weft_holders"
"""Attribute of a parameter of a tensor-parallel layer: the `Holders` of its entries."""
FOREACH_NORM = torch._foreach_norm
NORMS = frozenset(
    {FOREACH_NORM, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}
)
FINITE_CHECK = torch._amp_foreach_non_finite_check_and_unscale_
"""What torch.amp.GradScaler calls: whether an entry is not finite, for the tensors it gets."""


class Holders(NamedTuple):
    """The ranks that hold the entries of a parameter: those along `axes`, each a `span` of each of the
    parts that dim `dim` of the whole parameter consists of: one, or fused projections.
    """

    comm: Comm
    axes: tuple[str, ...]
    dim: int
    parts: tuple[int, ...]

    @property
    def length(self) -> int:
        """Entries of the dim in the whole parameter."""
        return sum(self.parts)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Bounds of this rank's entries of each part, in the whole dim."""
        degree, index = self.comm.degree(self.axes), self.comm.index(self.axes)
        found: list[tuple[int, int]] = []
        offset = 0
        for part in self.parts:
            start, stop = span(part, degree, index)
            found.append((offset + start, offset + stop))
            offset += part
        return tuple(found)

    @property
    def own_sizes(self) -> tuple[int, ...]:
        """Entries of each part that this rank holds."""
        return tuple(stop - start for start, stop in self.spans)


class ShardGradient(Tensor):
    """A gradient of which other ranks hold other entries (`holders`), or whose parameters' neighbours
    other ranks hold (None); operations yield plain tensors.

    Raises:
        PlanError: by torch's norms and loss scaling where neighbours are on other ranks: each call sees
            the gradients of this rank's stages alone, and they would be taken for all.
    """

    holders: Holders | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in NORMS:
            return _norms(func, args, options)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **options)
        if func is FINITE_CHECK:
            _agree_on_finite(args[0], found=args[1])
        return result

    def __deepcopy__(self, memo: Any) -> Tensor:
        plain = self.as_subclass(Tensor)
        return plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)


def part_of(gradient: Tensor, holders: Holders | None) -> Tensor:
    """The same memory as a `ShardGradient`."""
    part = gradient.as_subclass(ShardGradient)
    part.holders = holders
    return part


def _norms(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The norm over the ranks that hold the entries, of a gradient or of each of several."""
    given, *rest = args
    order = rest.pop(0) if rest else options.pop("ord", options.pop("p", 2.0))
    order = 2.0 if order in (None, "fro") else float(order)
    dims = rest[0] if rest else options.get("dim")
    parts = list(given) if func is FOREACH_NORM else [given]
    norms: list[Tensor] = []
    for part in parts:
        holders = _holders_of(part, "torch takes the norm of this rank's part alone")
        with torch._C.DisableTorchFunctionSubclass():
            local = torch.linalg.vector_norm(part, order, *rest, **options)
        if holders is not None and _is_reduced(holders.dim, dims, num_dims=part.dim()):
            local = _norm_over(holders, local, order)
        norms.append(local)
    return norms if func is FOREACH_NORM else norms[0]


def _is_reduced(dim: int, dims: Any, *, num_dims: int) -> bool:
    """Whether a norm over `dims`, a number or several, or over all (None, or none named), is taken over
    `dim`.
    """
    if dims is None:
        return True
    several = dims if isinstance(dims, (tuple, list)) else (dims,)
    return not several or any(each % num_dims == dim for each in several)


def _norm_over(holders: Holders, local: Tensor, order: float) -> Tensor:
    """The norm of a vector of which each rank has the norm of its part."""
    if order == float("inf"):
        return holders.comm.all_reduce(local, holders.axes, op="max")
    if order == float("-inf"):
        return holders.comm.all_reduce(local, holders.axes, op="min")
    if order == 0:
        return holders.comm.all_reduce(local, holders.axes)
    return holders.comm.all_reduce(local.pow(order), holders.axes).pow(1 / order)


def _agree_on_finite(gradients: Iterable[Tensor], *, found: Tensor) -> None:
    """Have every rank find an entry that is not finite where one of them has."""
    held = [
        _holders_of(each, "torch.amp.GradScaler checks this rank's part alone")
        for each in gradients
    ]
    groups = dict.fromkeys((each.comm, each.axes) for each in held if each is not None)
    for comm, axes in groups:
        comm.all_reduce_(found, axes, op="max")


def _holders_of(gradient: Tensor, what: str) -> Holders | None:
    """Those of a `ShardGradient`; None of a plain gradient.

    Raises:
        PlanError: other ranks hold the gradients of other stages.
    """
    if not isinstance(gradient, ShardGradient):
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


def mark_sharded(param: nn.Parameter, holders: Holders) -> None:
    """Note that other ranks hold other entries of a parameter, and have norms of its gradients be taken
    over them.
    """
    setattr(param, HOLDERS, holders)
    param.register_post_accumulate_grad_hook(mark_gradient)


class MarkedLayer(nn.Module):
    """A layer of whose parameters other ranks hold other entries; those of its deep copies are marked, too."""

    _marked: tuple[Sequence[str], Holders] | None = None

    def mark(self, names: Sequence[str], holders: Holders) -> None:
        """Mark its parameters of these names; see `mark_sharded`."""
        if holders.comm.degree(holders.axes) == 1:
            return
        self._marked = (names, holders)
        for name in names:
            param = getattr(self, name)
            if param is not None:
                mark_sharded(param, holders)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._marked is not None:
            self.mark(*self._marked)


def holders_of(param: Tensor) -> Holders | None:
    """What `mark_sharded` has noted of a parameter; None of others."""
    found: Holders | None = getattr(param, HOLDERS, None)
    return found


def mark_gradient(param: Tensor) -> None:
    """Make the gradient of a sharded parameter a `ShardGradient`, of the same memory."""
    holders = holders_of(param)
    if param.grad is not None and holders is not None:
        param.grad = part_of(param.grad, holders)


def shard_axes_of(param: Tensor) -> tuple[str, ...]:
    """The axes of `mark_sharded`; none for others."""
    holders = holders_of(param)
    return () if holders is None else holders.axes


def total_norm(
    comm: Comm, gradients: Iterable[tuple[Tensor, tuple[str, ...]]], *, over: Axis = ()
) -> Tensor:
    """The norm of gradients over all ranks, float64; a collective.

    Args:
        gradients: each with the mesh axes over which it is sharded.
        over: an axis along which ranks hold other parameters.
    """
    zero = torch.zeros((), dtype=torch.float64, device=comm.device)
    squares_of: dict[tuple[str, ...], Tensor] = {}
    for gradient, axes in gradients:
        squares = gradient.double().square()
        squares_of[axes] = squares_of.get(axes, zero) + squares.sum()
    total = zero
    for axes in sorted(squares_of):
        squares = squares_of[axes]
        total = total + (comm.all_reduce(squares, axes) if axes else squares)
    if axis_names(over):
        total = comm.all_reduce(total, over)
    return total.sqrt()


def clip_to(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm so that it is at most `max_norm`, as torch's clip_grad_norm_."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, comm: Comm) -> Tensor:
    """Scale gradients so that the norm of the whole model's is at most `max_norm`, where tensor-parallel
    layers hold a part of their parameters on each rank, plain or in a `DistributedDataParallel`. A
    collective over the axes of these layers: every rank calls it. torch's `clip_grad_norm_` does the
    same with an all-reduce for each of their parameters.

    Args:
        max_norm: the largest norm that stays as it is.
        comm: that the layers were made with.

    Returns:
        The norm before, float64, equal on these ranks.

    Raises:
        PlanError: the parameters are those of a pipeline, which has a `clip_grad_norm_` of its own.
    """
    gradients: list[tuple[Tensor, tuple[str, ...]]] = []
    for param in parameters:
        gradient = param.grad
        if gradient is None:
            continue
        axes = shard_axes_of(param)
        _holders_of(gradient, "weft.clip_grad_norm_ takes the norm of this rank's part alone")
        gradients.append((gradient.as_subclass(Tensor), axes))
    norm = total_norm(comm, gradients)
    clip_to((gradient for gradient, _ in gradients), norm, max_norm)
    return norm
