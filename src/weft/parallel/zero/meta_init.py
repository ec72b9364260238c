"""First values of a plain module that is wrapped: those of the first rank; modules on the meta device are allocated first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.errors import Fault, PlanError
from weft.parallel.model.buffers import broadcast_first


def own_modules(block: nn.Module, others: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of `block` itself and the modules below it, without `others` and what is below
    them.
    """
    excluded = set(map(id, others))
    yield "", block
    for name, child in block.named_children():
        if id(child) in excluded:
            continue
        for path, module in own_modules(child, others):
            full_path = f"{name}.{path}" if path else name
            yield full_path, module


def own_params(block: nn.Module, others: Iterable[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Parameters that `block` uses itself, outside of `others`, each once."""
    found: dict[int, nn.Parameter] = {}
    for _, module in own_modules(block, others):
        for param in module.parameters(recurse=False):
            found[id(param)] = param
    return tuple(found.values())


@torch.no_grad()
def init_block(
    block: nn.Module,
    others: Iterable[nn.Module],
    comm: Comm,
    axis: Axis,
    *,
    initialised: Collection[int] = (),
) -> None:
    """Give the parameters and buffers of `block`, outside of `others`, the first rank's values.

    Args:
        initialised: ids of parameters that have their values; they may be freed now.

    Raises:
        PlanError: a module on the meta device that has no `reset_parameters`, or one that leaves
            entries unset.
    """
    modules = tuple(own_modules(block, others))
    for path, module in modules:
        if any(tensor.is_meta for tensor in _own_tensors(module)):
            _materialize(path, module, comm.device, initialised=initialised)
    for _, module in modules:
        for tensor in _own_tensors(module):
            if id(tensor) not in initialised:
                # Also after `reset_parameters`: ranks may have drawn different numbers.
                broadcast_first(tensor, comm, axis)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _materialize(
    path: str, module: nn.Module, device: torch.device, *, initialised: Collection[int]
) -> None:
    """Allocate a module's own tensors and call its `reset_parameters`; initialised parameters keep
    their values.
    """
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        kind = type(module).__name__
        raise PlanError(
            Fault(
                path or kind,
                f"{kind} is on the meta device and has no reset_parameters",
                fix="give it one, or build it on a device",
            )
        )
    made: list[str] = []
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(module, name, _unset(buffer, device))
            made.append(name)
    params = dict(module.named_parameters(recurse=False))
    for name, param in params.items():
        empty = nn.Parameter(_unset(param, device), requires_grad=param.requires_grad)
        if id(param) in initialised:
            setattr(
                module, name, empty
            )  # tied to one that has its values: `reset_parameters` writes into this one
        elif param.is_meta:
            torch.utils.swap_tensors(
                param, empty
            )  # other modules that hold it keep the same object
            made.append(name)
    reset()
    for name in made:
        value = getattr(module, name)
        if value.is_floating_point() and bool(value.isnan().any()):
            fault = Fault(
                f"{path}.{name}" if path else name,
                f"has no values: it is on the meta device, and {type(module).__name__}.reset_parameters "
                "does not set it",
                fix="set it there, or build the module on a device",
            )
            raise PlanError(fault)
    for name, param in params.items():
        setattr(module, name, param)


def _unset(like: Tensor, device: torch.device) -> Tensor:
    """Memory for the values of a meta tensor: NaN, which shows entries that get none; 0 where the type has
    no NaN.
    """
    return torch.full(
        like.shape, float("nan") if like.is_floating_point() else 0, dtype=like.dtype, device=device
    )
