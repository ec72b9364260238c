"""Blocks that are built at their first access, so that a pipeline rank builds its own stages only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import nn

Builder = Callable[[], nn.Module]
"""Builds one block, a new one on each call."""

Builders = Mapping[str, Builder]
"""Builders of the blocks of a chain, by name and in order. Blocks of one builder are equal, but for
the values of their parameters; no two share a module or a parameter.
"""


def build_all(builders: Builders) -> dict[str, nn.Module]:
    """All blocks of a chain."""
    blocks: dict[str, nn.Module] = {}
    for name, build in builders.items():
        blocks[name] = build()
    return blocks


class LazyBlocks(Mapping[str, nn.Module]):
    """The blocks of a chain, each built at its first access.

    Args:
        builders: of the blocks.
        call: calls a builder, for example on the meta device.
    """

    def __init__(self, builders: Builders, call: Callable[[Builder], nn.Module]) -> None:
        self._builders = builders
        self._call = call
        self._built: dict[str, nn.Module] = {}

    def __getitem__(self, name: str) -> nn.Module:
        block = self._built.get(name)
        if block is None:
            build = self._builders[name]
            block = self._call(build)
            self._built[name] = block
        return block

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)

    def repeats(self, *, distinct: Collection[str]) -> dict[str, str]:
        """Name of a block -> name of the first block with the same builder, without those first
        blocks themselves.

        Args:
            distinct: blocks that equal no other one, for example because of a tied parameter.
        """
        firsts: dict[int, str] = {}
        found: dict[str, str] = {}
        for name, build in self._builders.items():
            if name in distinct:
                continue
            # by identity: the mapping keeps the builders alive, so no number is used twice
            first = firsts.setdefault(id(build), name)
            if first != name:
                found[name] = first
        return found

    def templates(self, repeats: Mapping[str, str]) -> dict[str, nn.Module]:
        """All blocks, new ones, but one module for the blocks that `repeats` calls equal."""
        modules: dict[str, nn.Module] = {}
        for name, build in self._builders.items():
            first = repeats.get(name)
            if first is None:
                modules[name] = self._call(build)
            else:
                modules[name] = modules[first]
        return modules
