"""What the trunk hands to layers beside the hidden state, and layers to later ones: it is carried in the stream of blocks.

embed      hidden_BSD, then each tensor flattened to [B, S, width]: all in one tensor, along its last dim
layer3     takes its own tensors, adds those that it computes for later layers, and hands on what these take
head       gets the hidden state alone

So per-layer embeddings and keys that later layers use again (Gemma 4), or embeddings that layers read
again (Zamba), have gradients through the chain, and reach every stage of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Place = int | str
"""Of an argument of a layer: its number, or its keyword."""
COLUMNS = 2
"""Dim of keys and values, [B, H, S, K], that counts tokens."""


@dataclass(frozen=True)
class SharedEntry:
    """Tensors [B, H, S, K] that a layer leaves in a mapping that all layers are given.

    Attributes:
        place: of the mapping.
        key: in the mapping.
        writer: number of the layer.
        numbers: of the tensors.
    """

    place: Place
    key: Any
    writer: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class CarriedTensors:
    """The tensors that layers are handed beside the hidden state.

    Attributes:
        hidden: shape of the hidden state without batch and sequence.
        batch_dim: dim of the hidden state that counts sequences; the next one counts tokens.
        shapes: of each tensor without batch and sequence.
        arguments: of each layer: place of an argument -> number of the tensor.
        shared: tensors that layers leave for later ones.
    """

    hidden: tuple[int, ...] = ()
    batch_dim: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    arguments: tuple[Mapping[Place, int], ...] = field(default=(), hash=False)
    shared: tuple[SharedEntry, ...] = ()

    def pack(self, x: Tensor, tensors: Mapping[int, Tensor], first: int) -> Tensor:
        """The stream that layer `first` gets, of its hidden state and all tensors."""
        x = x.movedim((self.batch_dim, self.batch_dim + 1), (0, 1))
        needed = self._needed(first)
        if not needed:
            return x
        return torch.cat([x.flatten(2), *(tensors[number].flatten(2) for number in needed)], dim=-1)

    def unpack(self, stream: Tensor, first: int) -> tuple[Tensor, dict[int, Tensor]]:
        """The hidden state of layer `first`, and the tensors for it and later ones by number."""
        needed = self._needed(first)
        tensors: dict[int, Tensor] = {}
        if needed:
            shapes = [self.hidden, *(self.shapes[number] for number in needed)]
            parts = stream.split([math.prod(shape) for shape in shapes], dim=-1)
            pairs = zip(parts, shapes, strict=True)
            stream, *others = [part.unflatten(-1, shape) for part, shape in pairs]
            tensors = dict(zip(needed, others, strict=True))
        return stream.movedim((0, 1), (self.batch_dim, self.batch_dim + 1)), tensors

    def _needed(self, first: int) -> list[int]:
        """Numbers of the tensors that layer `first` or later ones take."""
        found = {number for one in self.arguments[first:] for number in one.values()}
        if first < len(self.arguments):
            found.update(n for entry in self.shared if entry.writer < first for n in entry.numbers)
        return sorted(found)

    def give_shared(
        self, index: int, tensors: Mapping[int, Tensor], given: Mapping[Place, Any]
    ) -> None:
        """Put what earlier layers have left into the mapping that layer `index` is given."""
        for entry in self.shared:
            if entry.writer < index:
                found = (tensors[number].movedim(1, COLUMNS) for number in entry.numbers)
                given[entry.place][entry.key] = tuple(found)

    def take_shared(
        self, index: int, tensors: dict[int, Tensor], given: Mapping[Place, Any]
    ) -> None:
        """Take what layer `index` has left in the mapping."""
        for entry in self.shared:
            if entry.writer == index:
                left = given[entry.place][entry.key]
                for number, x in zip(entry.numbers, left, strict=True):
                    tensors[number] = x.movedim(COLUMNS, 1)


NOTHING = CarriedTensors()


def by_place(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[Place, Any]:
    """The arguments of a layer."""
    found: dict[Place, Any] = dict(enumerate(args))
    found.update(options)
    return found


def with_arguments(
    given: Mapping[Place, Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with others in some places."""
    new_args = tuple(given.get(index, value) for index, value in enumerate(args))
    return new_args, {name: given.get(name, value) for name, value in options.items()}
