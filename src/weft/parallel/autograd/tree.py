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


def map_leaves(tree: Any, kind: type[T], act: Callable[[T], Any]) -> Any:
    """The same tree with `act` applied to each leaf of this kind."""
    if isinstance(tree, kind):
        return act(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(item, kind, act) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_leaves(item, kind, act) for item in tree)
    if isinstance(tree, dict):
        return type(tree)((key, map_leaves(item, kind, act)) for key, item in tree.items())
    return tree
