"""Attention that layers compute by code of their own, and its arguments with an entry for each head, such as ALiBi."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.models.common.layers import RegionHeads
from weft.models.transformers.carried import Place, by_place, with_arguments
from weft.models.transformers.shard_sizes import ShardSizes, heads_of, is_size

HEADS = "weft_heads"
"""Child of an attention module that takes a rank's heads of an argument."""
EXAMPLES = ((2, 8), (3, 7))
"""Sequences and tokens of the runs that tell which dims count heads: the first dims of arguments count
sequences and heads, which grow, or tokens, which do not. Few tokens, since tables of positions end.
"""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class OwnAttention:
    """An attention module that does not call the interface.

    Attributes:
        path: of the module.
        attribute: of the module, with the number of heads that it computes.
        num_heads: of the whole attention.
        arguments: with an entry for each head -> along which dim; of sequences and heads together: 0.
    """

    path: str
    attribute: str
    num_heads: int
    arguments: Mapping[Place, int] = field(hash=False)

    def shard(self, module: nn.Module, config: Any) -> None:
        """Let the module of another model of the same config compute the heads of a rank."""
        ShardSizes(module, config)
        if self.arguments:
            setattr(module, HEADS, RegionHeads())
            module.register_forward_pre_hook(self._take_heads, with_kwargs=True)

    def _take_heads(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        of_rank: nn.Module = getattr(module, HEADS)
        number: int = getattr(module, self.attribute)
        given = by_place(args, options)
        taken: dict[Place, Any] = {}
        for place, dim in self.arguments.items():
            x: Tensor = given[place].unflatten(dim, (-1, self.num_heads))
            taken[place] = of_rank(x, dim + 1, number).flatten(dim, dim + 1)
        return with_arguments(taken, args, options)


def own_attentions(
    lm: nn.Module, layers: str, run: Callable[[int, int], object]
) -> tuple[OwnAttention, ...]:
    """The attention modules of the layers of a model that reads none through the interface.

    Args:
        run: runs the model on so many sequences of a length.
    """
    num_heads, _ = heads_of(lm.config)
    attributes = {
        path: name
        for path, module in lm.named_modules()
        if path.startswith(f"{layers}.") and (name := _counts_heads(module, num_heads))
    }
    shapes: list[dict[str, dict[Place, Shape]]] = []
    for rows, length in EXAMPLES:
        noted: dict[str, dict[Place, Shape]] = {}
        hooks = [
            lm.get_submodule(path).register_forward_pre_hook(
                partial(_note, noted, path), with_kwargs=True
            )
            for path in attributes
        ]
        try:
            run(rows, length)
        finally:
            for hook in hooks:
                hook.remove()
        shapes.append(noted)
    lengths = [
        {(num_heads,) * len(EXAMPLES), tuple(rows * num_heads for rows, _ in EXAMPLES)},
        {(num_heads,) * len(EXAMPLES)},
    ]
    return tuple(
        OwnAttention(
            path, name, num_heads, dict(_per_head([x.get(path, {}) for x in shapes], lengths))
        )
        for path, name in attributes.items()
    )


def _counts_heads(module: nn.Module, num_heads: int) -> str:
    """The attribute of a module with linears that is its number of heads; empty: it has none."""
    names = [
        name
        for name, value in vars(module).items()
        if type(value) is int and value == num_heads and is_size(name, value, {num_heads}, set())
    ]
    has_linears = any(isinstance(child, nn.Linear) for child in module.children())
    return names[0] if names and has_linears else ""


def _note(
    noted: dict[str, dict[Place, Shape]],
    path: str,
    _module: nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    given = by_place(args, options)
    noted[path] = {place: tuple(x.shape) for place, x in given.items() if isinstance(x, Tensor)}


def _per_head(
    runs: Sequence[Mapping[Place, Shape]], lengths: Sequence[Collection[Shape]]
) -> Iterator[tuple[Place, int]]:
    """The arguments of which a dim counts heads, whatever the number of sequences and tokens is.

    Args:
        lengths: of the first dims, those in all runs that count heads.
    """
    for place, shape in runs[0].items():
        for dim, of_heads in enumerate(lengths[: len(shape) - 1]):
            if tuple(run[place][dim] for run in runs if len(run.get(place, ())) > dim) in of_heads:
                yield place, dim
                break
