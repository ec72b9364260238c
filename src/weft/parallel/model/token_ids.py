"""Token ids for trial runs of a user's model: drawn from the whole vocabulary, and those that the model's code names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.models.common.uncompiled import uncompiled_mode
from weft.parallel.autograd.tree import tensors_in

SEED = 12345
MOST_NAMED = 256
"""Ids that a model's code names and a trial run reads."""
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isin"})


@dataclass
class NamedIds:
    """Collects the integers that a forward computes with integer tensors: `ids == 50256` names
    50256. So do integer tensors of at most one dim that are compared with others, and the entries
    where a table of the vocabulary's length differs from its first one.

    Attributes:
        found: the ids in the order of their first use, each with its neighbours: a threshold
            separates them.
    """

    vocab: int
    found: dict[int, None] = field(default_factory=dict)

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note what an operation says of ids."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.is_floating_point():
            return
        self._add(one for one in args if type(one) is int)
        compares = func.overloadpacket.__name__ in COMPARISONS
        for tensor in tensors_in(args):
            if not tensor.is_meta and not tensor.is_floating_point():
                self._note_values(tensor, compares=compares)

    def _note_values(self, tensor: Tensor, *, compares: bool) -> None:
        if tuple(tensor.shape) == (self.vocab,):
            differs = tensor != tensor[0]
            self._add(differs.nonzero().flatten()[:MOST_NAMED].tolist())
        elif compares and tensor.dim() <= 1:
            self._add(tensor.flatten()[:MOST_NAMED].tolist())

    def _add(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for near in (number, number - 1, number + 1):
                if 0 <= near < self.vocab and len(self.found) < MOST_NAMED:
                    self.found[int(near)] = None


@uncompiled_mode
class NotesIds(TorchDispatchMode):
    """Has the operations of a forward noted while it is active."""

    def __init__(self, ids: NamedIds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ids = ids

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        self._ids.note(func, args)
        return func(*args, **(kwargs or {}))


def draw_ids(num: int, length: int, *, vocab: int, named: Iterable[int] = ()) -> Tensor:
    """ids [num, length] of the whole vocabulary; as many of the named ids as fit in half of the
    places are among them, in drawn places.
    """
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, vocab, (num * length,), generator=generator)
    places = torch.randperm(num * length, generator=generator)[: num * length // 2].tolist()
    for place, one in zip(places, named, strict=False):
        ids[place] = one
    return ids.view(num, length)
