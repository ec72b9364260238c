"""Tensors among the arguments and results of functions, which are nested tuples, lists and dicts; notes about tensor objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def map_leaves(
    tree: Any,
    kind: type[T],
    act: Callable[[T], Any],
) -> Any:
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
        mapped: list[tuple[Any, Any]] = []
        for key, item in tree.items():
            mapped.append((key, map_leaves(item, kind, act)))
        return container(mapped)
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
