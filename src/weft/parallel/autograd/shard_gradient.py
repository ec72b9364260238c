"""Gradients of which a rank holds a part: norms of them alone are rejected; norms over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis, axis_names
from weft.errors import Fault, PlanError

SHARD_AXES = "_weft_shard_axes"
"""Attribute of a parameter of a tensor-parallel layer: mesh axes over which it is sharded."""
NORMS = frozenset(
    {
        torch._foreach_norm,
        torch.linalg.vector_norm,
        torch.linalg.norm,
        torch.norm,
        Tensor.norm,
    }
)
FINITE_CHECK = torch._amp_foreach_non_finite_check_and_unscale_
"""What torch.amp.GradScaler calls: whether an entry is not finite, for the tensors it gets."""
READS_OF_PENDING = frozenset({"__get__", "requires_grad_", "dim", "size", "numel"})
"""Functions that a gradient which was not synchronised may have called on it."""


class ShardGradient(Tensor):
    """A gradient of which other ranks hold other entries, or whose parameters' neighbours other
    ranks hold; operations yield plain tensors.

    Raises:
        PlanError: by torch's norms and loss scaling, which would take this rank's part for the
            whole.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in NORMS:
            fault = Fault(
                "gradients",
                "torch takes the norm of this rank's part alone, so ranks would clip differently",
                fix="clip_grad_norm_(max_norm) of the wrapped module, or weft.clip_grad_norm_ where only tensor-parallel "
                "layers are sharded; both return the norm over all ranks",
            )
            raise PlanError(fault)
        if func is FINITE_CHECK:
            fault = Fault(
                "gradients",
                "torch.amp.GradScaler checks this rank's part alone, so ranks would skip different steps",
                fix="bfloat16, which needs no loss scale, or weft train, which has one over all ranks",
            )
            raise PlanError(fault)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Tensor:
        plain = self.as_subclass(Tensor)
        return plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)


class PendingGradient(Tensor):
    """In the place of a gradient that was None, from a backward until gradients are synchronised:
    what reads or zeroes it is an error.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ not in READS_OF_PENDING:
            reject_unsynchronized_use(f"{func.__name__} was called on one")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def pending_gradient(param: Tensor) -> Tensor:
    """A `PendingGradient` in the shape of `param`, of one entry's memory."""
    entry = torch.zeros(1, dtype=param.dtype, device=param.device)
    return entry.expand(param.shape).as_subclass(PendingGradient)


def reject_unsynchronized_use(what: str) -> None:
    """Raise PlanError: gradients were read, changed or zeroed between a backward and their
    synchronisation.
    """
    fault = Fault(
        "gradients",
        f"used after a backward and before they are synchronised: {what}",
        fix="call finish_gradient_synchronization() first, also before a zero_grad() that discards them",
    )
    raise PlanError(fault)


def mark_sharded(param: nn.Parameter, axis: Axis) -> None:
    """Note that other ranks along `axis` hold other entries of a parameter, and have its gradients
    reject norms of this rank's part.
    """
    setattr(param, SHARD_AXES, axis_names(axis))
    param.register_post_accumulate_grad_hook(mark_gradient)


def mark_gradient(param: Tensor) -> None:
    """Make the gradient of a sharded parameter a `ShardGradient`, of the same memory."""
    if param.grad is not None and shard_axes_of(param):
        param.grad = param.grad.as_subclass(ShardGradient)


def shard_axes_of(param: Tensor) -> tuple[str, ...]:
    """The axes of `mark_sharded`; none for others."""
    axes: tuple[str, ...] = getattr(param, SHARD_AXES, ())
    return axes


def total_norm(
    comm: Comm,
    gradients: Iterable[tuple[Tensor, tuple[str, ...]]],
    *,
    over: Axis = (),
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


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    comm: Comm,
) -> Tensor:
    """Scale gradients so that the norm of the whole model's is at most `max_norm`, where tensor-parallel
    layers hold a part of their parameters on each rank, plain or in a `DistributedDataParallel`. A
    collective over the axes of these layers: every rank calls it.

    Args:
        max_norm: the largest norm that stays as it is.
        comm: that the layers were made with.

    Returns:
        The norm before, float64, equal on these ranks.

    Raises:
        PlanError: gradients are parts for another reason: the wrapper has a `clip_grad_norm_` of its
            own.
    """
    gradients: list[tuple[Tensor, tuple[str, ...]]] = []
    for param in parameters:
        gradient = param.grad
        if gradient is None:
            continue
        axes = shard_axes_of(param)
        if isinstance(gradient, ShardGradient) and not axes:
            fault = Fault(
                "gradients",
                "weft.clip_grad_norm_ got shards of a wrapper, whose axes it does not know",
                fix="clip_grad_norm_(max_norm) of the wrapped module",
            )
            raise PlanError(fault)
        gradients.append((gradient.as_subclass(Tensor), axes))
    norm = total_norm(comm, gradients)
    clip_to((gradient for gradient, _ in gradients), norm, max_norm)
    return norm
