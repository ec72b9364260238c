"""The chain of a user's model: modules by name from what `blocks(config)` returns, called with (x, batch), on any device."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from weft.errors import Fault, PlanError
from weft.models.common.batch import drop_batch
from weft.models.user_model import KEY

META = torch.device("meta")


def chain_of(made: Any, *, name: str) -> dict[str, nn.Module]:
    """Blocks by name, from what a user's `blocks` returns.

    Raises:
        PlanError: it is no chain of modules, or a module takes other arguments than (x) or (x,
            batch).
    """
    blocks = _named_modules_of(made, name=name)
    faults: list[Fault] = []
    hooked: set[int] = set()
    for block_name, block in blocks.items():
        if not isinstance(block, nn.Module):
            fault = Fault(
                KEY,
                f"{name}: block {block_name!r} is no nn.Module",
                got=type(block).__name__,
                fix="return modules",
            )
            faults.append(fault)
        elif not block_name or "." in block_name:
            fault = Fault(
                KEY,
                f"{name}: block {block_name!r} has a dot in its name",
                fix="name it without a dot",
            )
            faults.append(fault)
        elif id(block) not in hooked:
            hooked.add(id(block))
            faults.extend(_adapt_call(block_name, block))
    if not blocks:
        fault = Fault(
            KEY, f"{name}: blocks(config) returns no block", fix="return at least one module"
        )
        faults.append(fault)
    if faults:
        raise PlanError(*faults)
    for block in blocks.values():
        _drop_weak_references(block)
    return blocks


def _drop_weak_references(block: nn.Module) -> None:
    """Of recurrent modules to their weights: torch swaps no tensor that has one. They only tell
    whether weights were moved one by one.
    """
    for module in block.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weights)


def _named_modules_of(made: Any, *, name: str) -> dict[str, Any]:
    if isinstance(made, (nn.Sequential, nn.ModuleDict, nn.ModuleList)):
        return dict(made._modules)  # named_children() leaves repeated modules out
    if isinstance(made, Mapping):
        return {str(block_name): block for block_name, block in made.items()}
    if isinstance(made, (list, tuple)):
        if all(map(_is_pair, made)):
            return dict(made)
        return {str(place): block for place, block in enumerate(made)}
    fault = Fault(
        KEY,
        f"{name}: blocks(config) returns no chain",
        got=type(made).__name__,
        need="modules by name, an nn.Sequential, or any module with a blocks_of(module)",
        fix="return an nn.Sequential",
    )
    raise PlanError(fault)


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2


def _adapt_call(name: str, block: nn.Module) -> Iterator[Fault]:
    """Let a block whose forward takes x alone be called with (x, batch)."""
    positional: list[str] = []
    num_required = 0
    takes_any = False
    for parameter in inspect.signature(block.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            takes_any = True
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter.name)
            if parameter.default is parameter.empty:
                num_required += 1
    takes_nothing = not positional and not takes_any
    if num_required > 2 or takes_nothing:
        names = ", ".join(positional)
        yield Fault(
            KEY,
            f"block {name!r} is called with (x) or (x, batch)",
            got=f"{type(block).__name__}.forward({names})",
            fix="wrap it in a module whose forward takes x",
        )
        return
    takes_batch = num_required == 2 or positional[1:2] == ["batch"]
    if not takes_batch and not takes_any:
        block.register_forward_pre_hook(drop_batch)


class _Copies:
    """Tensors in place of others; what is one object stays one."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._kept: list[Tensor] = []  # so that no other tensor gets the identity of one
        self._empty: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The one in place of this tensor."""
        key = id(tensor)
        if key not in self._empty:
            empty = self._make(tensor)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            self._kept.append(tensor)
            self._empty[key] = empty
        return self._empty[key]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that this thread registers get no memory, so that initialising them costs nothing;
    what is one object stays one.
    """
    copies = _Copies(_on_meta)
    thread = threading.get_ident()

    def replace(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        is_own = threading.get_ident() == thread
        return copies.of(param) if is_own and param is not None and not param.is_meta else None

    hook = register_module_parameter_registration_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def has_meta_values(blocks: Mapping[str, nn.Module]) -> bool:
    """Whether a buffer, or a tensor that is an attribute, has no memory."""
    for block in blocks.values():
        for module in block.modules():
            for holder in (module._buffers, module.__dict__):
                if any(map(_is_meta, holder.values())):
                    return True
    return False


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def move_to_meta(blocks: Mapping[str, nn.Module], *, parameters_only: bool) -> None:
    """Replace parameters (and buffers, and tensors that are attributes) by ones without memory;
    what is one object stays one.
    """
    copies = _Copies(_on_meta)
    for block in blocks.values():
        for module in block.modules():
            holders: list[dict[str, Any]] = [module._parameters]
            if not parameters_only:
                holders += [module._buffers, module.__dict__]
            for holder in holders:
                _replace_values(holder, copies, only=_has_memory)


def replace_tensors(blocks: Mapping[str, nn.Module], make: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters, buffers and tensors that are attributes by what `make` returns for them;
    what is one object stays one.
    """
    copies = _Copies(make)
    for block in blocks.values():
        for module in block.modules():
            for holder in (module._parameters, module._buffers, module.__dict__):
                _replace_values(holder, copies, only=_is_tensor)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=META)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _replace_values(
    holder: dict[str, Any], copies: _Copies, *, only: Callable[[object], bool]
) -> None:
    for name, value in holder.items():
        if only(value):
            holder[name] = copies.of(value)
