"""Owns how a plain module gets its first values: from the first rank, and where it has no memory yet, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.errors import Fault, PlanError


def own_modules(block: nn.Module, others: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `block`, itself first, but none of `others` nor what is below them; each with its path."""
    stop = {id(other) for other in others} - {id(block)}
    yield "", block
    for name, child in block.named_children():
        if id(child) not in stop:
            for path, module in own_modules(child, others):
                yield f"{name}.{path}" if path else name, module


def own_params(block: nn.Module, others: Iterable[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Parameters that `block` uses itself, outside of `others`, each once."""
    found = {id(param): param for _, module in own_modules(block, others) for param in module.parameters(recurse=False)}
    return tuple(found.values())


@torch.no_grad()
def fill(block: nn.Module, others: Iterable[nn.Module], comm: Comm, axis: Axis, *, taken: Collection[int] = ()) -> None:
    """Give what `block` owns, outside of `others`, the first rank's values; what is on the meta device gets memory first.

    Args:
        taken: ids of parameters that have their values already, and perhaps no memory now.

    Raises:
        PlanError: a module on the meta device that has no `reset_parameters`.
    """
    modules = tuple(own_modules(block, others))
    for path, module in modules:
        if any(tensor.is_meta for tensor in _own_tensors(module)):
            _materialize(path, module, comm.device, taken=taken)
    for _, module in modules:
        for tensor in _own_tensors(module):
            if id(tensor) not in taken:
                comm.broadcast_(tensor, axis, root=0)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _materialize(path: str, module: nn.Module, device: torch.device, *, taken: Collection[int]) -> None:
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        what = f"{type(module).__name__} is on the meta device and has no reset_parameters"
        raise PlanError(Fault(path or type(module).__name__, what, fix="give it one, or build it on a device"))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(module, name, torch.zeros_like(buffer, device=device))
    kept = dict(module.named_parameters(recurse=False))
    for name, param in kept.items():
        empty = nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device=device), requires_grad=param.requires_grad
        )
        if id(param) in taken:
            setattr(module, name, empty)  # tied to one that has its values: `reset_parameters` may have this one
        elif param.is_meta:
            torch.utils.swap_tensors(param, empty)  # whoever else holds it keeps the same object
    reset()
    for name, param in kept.items():
        setattr(module, name, param)
