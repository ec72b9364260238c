"""Owns walking the arguments and results of modules: tensors in tuples, lists, dicts, however nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


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


def map_tensors(tree: Any, act: Callable[[Tensor], Any]) -> Any:
    """The same tree with `act` applied to each tensor."""
    if isinstance(tree, Tensor):
        return act(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(item, act) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(item, act) for item in tree)
    if isinstance(tree, dict):
        return type(tree)((key, map_tensors(item, act)) for key, item in tree.items())
    return tree
