"""Tensors in arguments and results: nested tuples, lists, dicts and data classes; notes about tensor objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    for leaf in leaves_in(tree):
        if isinstance(leaf, Tensor):
            yield leaf


def leaves_in(tree: Any) -> Iterator[Any]:
    """What a tree has in its tuples, lists, dicts and data classes, in order."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves_in(item)
    elif is_data_object(tree):
        for field in fields(tree):
            yield from leaves_in(getattr(tree, field.name))
    else:
        yield tree


def is_data_object(tree: Any) -> bool:
    """Whether it is an instance of a data class."""
    return hasattr(type(tree), "__dataclass_fields__")


def map_leaves(tree: Any, kind: type[T], act: Callable[[T], Any]) -> Any:
    """The same tree with `act` applied to each leaf of this kind."""
    if isinstance(tree, kind):
        return act(tree)
    container = type(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_leaves(item, kind, act) for item in tree]
        if hasattr(tree, "_fields"):  # a named tuple
            return container(*items)
        return container(items)
    if isinstance(tree, dict):
        mapped = copy.copy(tree)  # a subclass may take other arguments than items
        for key, item in tree.items():
            mapped[key] = map_leaves(item, kind, act)
        return mapped
    if is_data_object(tree):
        changes: dict[str, Any] = {}
        for field in fields(tree):
            if field.init:
                changes[field.name] = map_leaves(getattr(tree, field.name), kind, act)
        return replace(tree, **changes)
    return tree


class TensorNotes(Generic[T]):
    """A value for each of some tensor objects, which are kept alive: so their ids stay their own."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[Tensor, T]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._notes

    def get(self, tensor: Tensor) -> T | None:
        """The value of a tensor; None where it has none."""
        note = self._notes.get(id(tensor))
        if note is None:
            return None
        _, value = note
        return value

    def set(self, tensor: Tensor, value: T) -> None:
        """Note a value, in place of an earlier one."""
        self._notes[id(tensor)] = (tensor, value)
