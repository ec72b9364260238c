"""Seams that parallel code replaces: a subclass is replaced only if it declares what it computes, and all of it is supported."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from weft.errors import Fault, PlanError


class SeamModule(Protocol):
    """A module with declared requirements: names of what an implementation in its place must
    compute.
    """

    @property
    def requirements(self) -> frozenset[str]: ...


def check_replaceable(
    module: nn.Module, base: type[nn.Module], *, name: str, supports: frozenset[str], key: str
) -> None:
    """Reject a seam that the implementation `name` cannot stand for.

    Args:
        base: the seam's own class.
        supports: requirements that the implementation computes.
        key: path of the module, for messages.

    Raises:
        PlanError: a subclass that overrides `forward` without declaring `requirements`, or one that
            requires more.
    """
    if not _declares(module, base):
        what = f"{type(module).__name__} overrides {base.__name__}.forward without declaring its requirements"
        raise PlanError(
            Fault(
                key,
                what,
                need=f"`requirements` that {name} can compute",
                fix=f"use {base.__name__}",
            )
        )
    requirements: frozenset[str] = module.requirements  # type: ignore[assignment]
    missing = sorted(requirements - supports)
    if missing:
        what = f"{name} does not support {', '.join(missing)}"
        raise PlanError(Fault(key, what, need=f"of {', '.join(sorted(supports))}"))


def _declares(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether the class that defines `forward`, or a subclass of it, defines `requirements`, too."""
    if "forward" in vars(module):
        return False
    for cls in type(module).__mro__:
        if cls is base or "requirements" in vars(cls):
            return True
        if "forward" in vars(cls):
            return False
    return False
