"""Owns the form of a weight table: which of their tensors holds which of ours, and how it lies there. Pure: no torch.

    Row("layer{layer}.attn.q.weight", "model.layers.{layer}.self_attn.q_proj.weight")

`{layer}` names a set of places where the row holds (`WeightTable.places`). A row without braces holds once. With
`{expert}` in their name alone, ours is the stack of their tensors: expert e is ours[e].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

Pairs = tuple[tuple[int, int], ...]
"""(our index, their index) of each place: `((0, 61),)` for one that they call 61."""

Places = Mapping[str, Pairs]
"""Name of a set -> its places."""

EXPERT = "{expert}"


@dataclass(frozen=True)
class Share:
    """Part `index` of `parts` equal ones of their tensor, cut along `dim` as it lies there."""

    index: int
    parts: int
    dim: int


@dataclass(frozen=True)
class Row:
    """One of our names, and where it is found.

    Attributes:
        share: the part of their tensor that is ours, where several of ours lie in one.
        transposed: ours is the transpose of (that part of) theirs.
        is_wide: never stored in fewer than 32 bits, whatever the type of the others.
        is_copied: an alias of ours that is written all the same.
    """

    ours: str
    theirs: str
    share: Share | None = None
    transposed: bool = False
    is_wide: bool = False
    is_copied: bool = False

    def at(self, places: Places) -> Iterator[Row]:
        """The row at each place where it holds, with names that are whole but for `{expert}`."""
        for name, pairs in places.items():
            if f"{{{name}}}" in self.theirs:
                for ours, theirs in pairs:
                    yield replace(
                        self,
                        ours=self.ours.replace(f"{{{name}}}", str(ours)),
                        theirs=self.theirs.replace(f"{{{name}}}", str(theirs)),
                    )
                return
        yield self


@dataclass(frozen=True)
class WeightTable:
    """One family's tensors.

    Attributes:
        family: weft's name.
        rows: as files are published; also what is written.
        packed: rows that take the place of those with the same name of ours where their tensor is in the files:
            as transformers holds experts in memory.
        places: of the Config -> places of every set that rows name.
        redundant: patterns of their tensors that hold no weight, and are passed over.
        left_out: of the Config -> patterns of their tensors which that config has no use for.
        prefix: what older files leave out at the head of their names.
    """

    family: str
    rows: tuple[Row, ...]
    places: Callable[[Any], Places]
    packed: tuple[Row, ...] = ()
    redundant: tuple[str, ...] = ()
    left_out: Callable[[Any], tuple[str, ...]] = lambda cfg: ()
    prefix: str = ""


def same(count: int) -> Pairs:
    """Places 0 to `count`, with one index for both."""
    return tuple((i, i) for i in range(count))


def between(first: int, stop: int) -> Pairs:
    """Places `first` to `stop`, with one index for both."""
    return tuple((i, i) for i in range(first, stop))


def rows(ours: str, theirs: str, names: Mapping[str, str]) -> tuple[Row, ...]:
    """Rows below one head: our name -> their name."""
    return tuple(Row(f"{ours}.{our}", f"{theirs}.{their}") for our, their in names.items())
