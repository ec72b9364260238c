"""Values of whole numbers on the meta device: tokens are routed evenly, and what code computes of that is there to be read.

Note [Routed values]
    Some mixtures of experts ask which experts have tokens, and how many: `nonzero`, `item`, `tolist`.
    On the meta device the numbers of experts that `topk` yields are invented here, the same load for
    each, and every operation on tensors of known values is computed beside, on the CPU:

        topk ── numbers ── one_hot ── sum ── nonzero ── for expert in ...: hidden[tokens of expert]
                even load          values beside them   read              without values

    So shapes, operations and memory are those of an even load, as they are for weft's own dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from weft.models.common.uncompiled import uncompiled_mode

MOST_ENTRIES, MOST_WHOLE = 2**20, 2**26
"""Entries of a tensor whose values are kept, and of one of whole numbers: of all tokens and experts."""
CPU = torch.device("cpu")
META = torch.device("meta")


@uncompiled_mode
class RoutedValues(TorchDispatchMode):
    """Keeps values beside tensors of the meta device; see Note [Routed values]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_known = all(id(x) in self._values for x in tensors if x.is_meta)
        is_meta = any(x.is_meta for x in tensors) or kwargs.get("device") == META
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not is_known or not is_meta or is_drawn or "empty" in func.overloadpacket.__name__:
            out = func(*args, **kwargs)
            if func._schema.is_mutable:
                self._values.pop(id(out), None)
            if func.overloadpacket is torch.ops.aten.topk:
                numbers = out[1]
                dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
                self._values[id(numbers)] = (numbers, even_load(args[0], numbers, dim))
            return out
        return self._with_values(func, args, kwargs)

    def _with_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            out = func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - it reads values, or has a shape by them
            out = None
        if any(map(_is_large, tree_leaves(out))):
            return out
        with _disable_current_modes():
            known = func(*tree_map(self._known, args), **tree_map(self._known, kwargs))
        if kwargs.get("device") == CPU:
            return known
        if out is None:
            out = tree_map(_on_meta, known)
        for x, values in zip(tree_flatten(out)[0], tree_flatten(known)[0], strict=True):
            if isinstance(x, Tensor) and x.is_meta:
                self._values[id(x)] = (x, values)
        return out

    def _known(self, x: Any) -> Any:
        """The values of a tensor; the CPU in place of the meta device."""
        if isinstance(x, Tensor):
            return self._values[id(x)][1] if x.is_meta else x
        return CPU if isinstance(x, torch.device) and x == META else x


def _is_large(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    return x.numel() > (MOST_ENTRIES if x.is_floating_point() else MOST_WHOLE)


class ReadLists(TorchFunctionMode):
    """Lists of whole numbers, which torch reads past dispatch, are read on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of `func`."""
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        return func(*args, **(kwargs or {}))


@contextmanager
def routed_values() -> Iterator[None]:
    """Whole numbers of the meta device have values inside; see Note [Routed values]."""
    with RoutedValues(), ReadLists():
        yield


def _on_meta(x: Any) -> Any:
    """A tensor without values in place of whole numbers that shape others; others are read."""
    return torch.empty_like(x, device=META) if isinstance(x, Tensor) else x


def even_load(scores: Tensor, numbers: Tensor, dim: int) -> Tensor:
    """Numbers of experts by which each has as many tokens, in the place of those of `topk`."""
    outer = list(numbers.shape)
    top_k = outer.pop(dim)
    with _disable_current_modes():
        places = torch.arange(numbers.numel(), device=CPU).reshape(*outer, top_k)
        return (places % scores.shape[dim]).movedim(-1, dim)
