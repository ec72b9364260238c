"""Families some of whose linears compute in 8-bit floats; see Note [Products in fp8] in linear_products.py."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn

from weft.errors import Fault, PlanError
from weft.models import Family, builders_of
from weft.models.common.fp8_experts import use_fp8_experts
from weft.models.common.lazy_blocks import Builder, Builders
from weft.models.common.linear_products import use_fp8


@dataclass(frozen=True)
class Fp8Family:
    """A family whose linears, and matrices of experts, of these global names compute in fp8."""

    plain: Family
    linears: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The plain family's chain, with these linears."""
        blocks = self.plain.blocks(cfg)
        for name, block in blocks.items():
            _change(name, block, self._paths(name))
        return blocks

    def builders(self, cfg: Any) -> Builders | None:
        """Builders of these blocks; equal where the plain ones and their linears are."""
        plain = builders_of(self.plain, cfg)
        if plain is None:
            return None
        known: dict[Hashable, Builder] = {}
        builders: dict[str, Builder] = {}
        for name, build in plain.items():
            paths = self._paths(name)
            own = partial(_build, name, build, paths)
            # one builder for equal blocks: planning looks at one of them for all
            builders[name] = known.setdefault((id(build), paths), own)
        return builders

    def _paths(self, block: str) -> tuple[str, ...]:
        """Paths of the linears in a block."""
        prefix = f"{block}."
        return tuple(name.removeprefix(prefix) for name in self.linears if name.startswith(prefix))


def _build(name: str, build: Builder, paths: Collection[str]) -> nn.Module:
    block = build()
    _change(name, block, paths)
    return block


def _change(name: str, block: nn.Module, paths: Collection[str]) -> None:
    """Have the linears, and the matrices of experts, at these paths of a block compute in fp8.

    Raises:
        PlanError: one is no plain linear, whose own forward fp8 would replace.
    """
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        holder = block.get_submodule(parent)
        if leaf in holder._parameters:
            use_fp8_experts(holder, leaf)
            continue
        linear = block.get_submodule(path)
        if type(linear) is not nn.Linear or "forward" in vars(linear):
            what = f"{name}.{path} is a {type(linear).__name__} with a forward of its own"
            fix = f"--precision.fp8_exclude {path}"
            raise PlanError(Fault("precision.linears", what, need="torch.nn.Linear", fix=fix))
        use_fp8(linear)


def with_fp8(plain: Family, linears: tuple[str, ...]) -> Family:
    """The family with these linears in fp8; the plain family where there are none."""
    return cast(Family, Fp8Family(plain, linears)) if linears else plain
