"""Blocks of a chain that are equal but for the values of their parameters, found by comparing their modules."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from torch import Tensor, nn

MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module whose members are compared one by one."""


def equal_blocks(blocks: Mapping[str, nn.Module], *, distinct: Collection[str]) -> dict[str, str]:
    """Name of a block -> name of the first block that equals it, without those first blocks.

    Blocks are equal whose modules have the same classes and attributes, and parameters and buffers
    of the same shapes. An attribute that cannot be compared equals itself alone, so two blocks that
    compute differently are never called equal.

    Args:
        distinct: blocks that equal no other one, for example because of a tied parameter.
    """
    firsts: dict[Hashable, str] = {}
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, block in blocks.items():
        members = _identities(block)
        is_shared = not seen.isdisjoint(members)
        seen.update(members)
        if name in distinct or is_shared:
            continue
        first = firsts.setdefault(_form(block), name)
        if first != name:
            found[name] = first
    return found


def _identities(block: nn.Module) -> set[int]:
    """Identities of the modules and parameters of a block."""
    found = {id(module) for module in block.modules()}
    found.update(id(param) for param in block.parameters())
    return found


def _form(module: nn.Module) -> Hashable:
    """What a module is, apart from the values of its tensors."""
    attributes: list[Hashable] = []
    for name, value in vars(module).items():
        if name not in MODULE_TABLES:
            attributes.append((name, _comparable(value)))
    params = tuple((name, _tensor_form(param)) for name, param in module._parameters.items())
    buffers = tuple((name, _tensor_form(buffer)) for name, buffer in module._buffers.items())
    children: list[Hashable] = []
    for name, child in module._modules.items():
        children.append((name, None if child is None else _form(child)))
    return type(module), tuple(attributes), params, buffers, tuple(children)


def _tensor_form(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.requires_grad


def _comparable(value: object) -> Hashable:
    """A value that equals only those of equal attributes."""
    if isinstance(value, list | tuple):
        return type(value), tuple(_comparable(item) for item in value)
    if isinstance(value, dict):
        items = tuple((key, _comparable(item)) for key, item in value.items())
        return type(value), items
    if isinstance(value, set) and not value:
        return type(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), id(value) if isinstance(value, Tensor) else value
