"""Numbers of heads and features that attention modules of transformers keep as attributes: those of a rank while it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from weft.models.transformers.sizes import SIZES, own_name

NO_COUNTS = ("dim", "size", "group")
"""Parts of names of attributes that count no heads, though their name has "head"."""

HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")


class ShardSizes:
    """Hooks of an attention module that reads its sizes from attributes, or from its config.

    While its forward runs, they are scaled as the rows of its column-parallel linears are: a
    `view(B, S, self.num_heads, self.head_dim)` or `split(self.split_size)` fits the shards of a rank.
    For fused weights that are sharded by their parts alone: only there the trace compares the pieces
    that the code takes with what they are.
    """

    def __init__(self, module: nn.Module, config: Any) -> None:
        own = getattr(module, "config", None)
        self._config = own if own is config else None
        heads, kv_heads = heads_of(config)
        self._in_config = dict(_sizes_of_config(config)) if self._config is not None else {}
        head_size = next((vars(module)[name] for name in HEAD_SIZES if name in vars(module)), None)
        widths = {heads * head_size, kv_heads * head_size} if isinstance(head_size, int) else set()
        self._sizes = {
            name: value
            for name, value in vars(module).items()
            if type(value) is int and is_size(name, value, {heads, kv_heads}, widths)
        }
        module.register_forward_pre_hook(self._scale)
        module.register_forward_hook(self._restore, always_call=True)

    def _scale(self, module: nn.Module, _args: object) -> None:
        for linear in module.children():
            whole = getattr(linear, "out_features", None)
            weight: Any = getattr(linear, "weight", None)
            if whole is None or weight is None or weight.shape[0] == whole:
                continue
            rows = weight.shape[0]
            for name, size in self._sizes.items():
                setattr(module, name, size * rows // whole)
            if self._config is not None:
                of_rank = copy.copy(self._config)
                vars(of_rank).update(
                    {name: size * rows // whole for name, size in self._in_config.items()}
                )
                module.config = of_rank
            return

    def _restore(self, module: nn.Module, _args: object, _out: object) -> None:
        for name, size in self._sizes.items():
            setattr(module, name, size)
        if self._config is not None:
            module.config = self._config


def heads_of(config: Any) -> tuple[int, int]:
    """Those of queries, and those of keys and values."""
    numbers = [number for _, number in _sizes_of_config(config)] or [0]
    return numbers[0], numbers[-1]


def _sizes_of_config(config: Any) -> Iterator[tuple[str, int]]:
    """(attribute, number) of heads, then of those of keys and values."""
    for field in ("heads", "kv_heads"):
        names = (own_name(config, name) for name in SIZES[field].names)
        found = next((name for name in names if isinstance(vars(config).get(name), int)), None)
        if found is not None:
            yield found, vars(config)[found]


def is_size(name: str, value: int, counts: set[int], widths: set[int]) -> bool:
    """Whether an attribute counts heads, or the features of all heads."""
    is_of_head = "head" in name
    if is_of_head and not any(word in name for word in NO_COUNTS):
        return value in counts
    return (not is_of_head or "all_head" in name) and value in widths
