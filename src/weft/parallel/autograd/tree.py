"""Leaves of nested tuples, lists and dicts: the arguments and results of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
