"""Owns the way back: which of our tensors make up each of theirs, as files are published. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.hf.files import some
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault
from weft.hf.recipe import Recipe, Shape, share_start, shifted
from weft.hf.table import EXPERT, Row, WeightTable


@dataclass(frozen=True)
class User:
    """One of our tensors that fills a part of theirs.

    Attributes:
        ours: its name, the owner's where it is tied.
        expert: which of its experts; -1 where it is no stack.
    """

    ours: str
    recipe: Recipe
    expert: int = -1


@dataclass(frozen=True)
class Fill:
    """A box of ours and where it goes: `at` is an index of an array that holds just the box of theirs that was asked for."""

    ours: str
    box: Box
    transposed: bool
    at: tuple[slice, ...]


@dataclass(frozen=True)
class Target:
    """One of their tensors."""

    name: str
    shape: Shape
    users: tuple[User, ...]

    @property
    def is_wide(self) -> bool:
        """Never stored in fewer than 32 bits."""
        return any(user.recipe.row.is_wide for user in self.users)

    def fills(self, box: Box) -> Iterator[Fill]:
        """What a box of theirs is made of."""
        for user in self.users:
            row = user.recipe.row
            start = share_start(self.shape, row.share) if row.share else (0,) * len(self.shape)
            part = _part(self.shape, row)
            inner = Box(start, tuple(lo + n for lo, n in zip(start, part, strict=True))) & box
            if inner.size:
                yield Fill(user.ours, _ours(user, shifted(inner, start, -1)), row.transposed, inner.within(box))


def targets(
    table: WeightTable, cfg: Any, shapes: Mapping[str, Shape], *, ties: Mapping[str, str], where: str
) -> tuple[Target, ...]:
    """All tensors of a folder that holds a model, in the order of the table.

    Args:
        shapes: of our tensors; tied ones under their owner's name.
        where: what to name when something is wrong.

    Raises:
        CheckpointError: the table and the tensors do not match: each of ours is to be used exactly once.
    """
    places = table.places(cfg)
    rows = [row for each in table.rows for row in each.at(places) if row.ours not in ties or row.is_copied]
    own = [row.ours for row in rows if row.ours not in ties]
    if missing := sorted(set(own) - set(shapes)):
        raise CheckpointError(Fault(where, "holds no tensor of these names", some(missing)))
    if left := sorted(set(shapes) - set(own)):
        raise CheckpointError(Fault(where, "holds tensors that a Hugging Face folder has no place for", some(left)))
    found: dict[str, list[User]] = {}
    for row in rows:
        owner = ties.get(row.ours, row.ours)
        for name, user in _users(row, owner, shapes[owner]):
            found.setdefault(name, []).append(user)
    return tuple(Target(name, users[0].recipe.source, tuple(users)) for name, users in found.items())


def _users(row: Row, owner: str, shape: Shape) -> Iterator[tuple[str, User]]:
    """Their tensors that one of ours goes to."""
    if EXPERT not in row.theirs:
        yield row.theirs, User(owner, Recipe(row, _source(shape, row)))
        return
    recipe = Recipe(row, _source(shape[1:], row), experts=shape[0])
    for expert, name in enumerate(recipe.theirs):
        yield name, User(owner, recipe, expert)


def _source(shape: Shape, row: Row) -> Shape:
    """Shape of their tensor, from that of (one expert of) ours."""
    lies = shape[::-1] if row.transposed else shape
    if row.share is None:
        return lies
    return tuple(n * row.share.parts if dim == row.share.dim else n for dim, n in enumerate(lies))


def _part(shape: Shape, row: Row) -> Shape:
    if row.share is None:
        return shape
    return tuple(n // row.share.parts if dim == row.share.dim else n for dim, n in enumerate(shape))


def _ours(user: User, box: Box) -> Box:
    """A box of the user's part of their tensor, as it lies in ours."""
    lo, hi = (box.lo[::-1], box.hi[::-1]) if user.recipe.row.transposed else (box.lo, box.hi)
    return Box(lo, hi) if user.expert < 0 else Box((user.expert, *lo), (user.expert + 1, *hi))
