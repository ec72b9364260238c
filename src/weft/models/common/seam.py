"""Seams that parallel code replaces: a subclass is replaced only if it declares what it computes, and all of it is supported."""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from weft.errors import Fault, PlanError


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
    check_declared(module, base, name=name, key=key, fix=f"use {base.__name__}")
    requirements: frozenset[str] = module.requirements  # type: ignore[assignment]
    check_supported(requirements, supports, name=name, key=key)


def check_declared(
    module: nn.Module, base: type[nn.Module], *, name: str, key: str, fix: str
) -> None:
    """Reject a seam whose `forward` computes what no `requirements` declare.

    Raises:
        PlanError: a subclass of `base` that overrides `forward` without declaring `requirements`.
    """
    if not _declares(module, base):
        what = f"{type(module).__name__} overrides {base.__name__}.forward without declaring its requirements"
        need = f"`requirements` that {name} can compute"
        raise PlanError(Fault(key, what, need=need, fix=fix))


def check_supported(
    requirements: Set[str], supports: Set[str], *, name: str, key: str, fix: str = ""
) -> None:
    """Reject requirements that the implementation `name` does not compute.

    Raises:
        PlanError: `requirements` are not all in `supports`.
    """
    missing = sorted(requirements - supports)
    if missing:
        what = f"{name} does not support {', '.join(missing)}"
        need = f"one of {', '.join(sorted(supports))}"
        raise PlanError(Fault(key, what, need=need, fix=fix))


def _declares(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether the class that defines `forward`, or a subclass of it, defines `requirements`, too."""
    # set on the instance: no class says what it computes
    if "forward" in vars(module):
        return False
    for cls in type(module).__mro__:
        # the more derived class comes first: its requirements are those of the forward that it has or inherits
        if cls is base or "requirements" in vars(cls):
            return True
        if "forward" in vars(cls):
            return False
    return False
