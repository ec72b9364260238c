"""The modules of a plain block whose parameters are sharded over tp, by kind, and which classes of them are supported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from weft.core.axes import Rule
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import sharded_over
from weft.errors import Fault, PlanError
from weft.models.common.batch import drop_batch
from weft.models.common.embedding_noise import NoisyEmbedding
from weft.models.common.experts import expert_matrices
from weft.models.common.init import path_below
from weft.models.common.layers import RegionOutput
from weft.models.common.linear_products import Fp8Linear
from weft.models.common.lora import LoraLinear
from weft.parallel.tp import AXIS

LINEARS = (nn.Linear, LoraLinear, Fp8Linear)
EMBEDDINGS = (nn.Embedding, NoisyEmbedding)
"""Classes of linears and embeddings that the parallel ones stand for; a subclass of the user's may compute
something else.
"""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold hooks which its calls run."""


class ShardedExperts(NamedTuple):
    """A parameter that holds matrices of routed experts: path of its module, its name, its sharded dim."""

    path: str
    name: str
    dim: int


@dataclass(frozen=True)
class ShardedModules:
    """Paths of the sharded modules below one block, by kind.

    Attributes:
        columns: linears whose output features are sharded.
        rows: linears whose input features are sharded.
        inner_rows: those of them inside declared regions: each rank has a part of the results.
        embeddings: embeddings whose vocabulary is sharded.
        regions: modules that declare both ends of a region.
        experts: parameters that hold matrices of routed experts, with their dim that is sharded.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    inner_rows: tuple[str, ...]
    embeddings: tuple[str, ...]
    regions: tuple[str, ...]
    experts: tuple[ShardedExperts, ...]

    def is_in_region(self, path: str) -> bool:
        """Whether the module at `path` is inside a declared region."""
        return is_below_any(path, self.regions)


def is_below_any(path: str, regions: Iterable[str]) -> bool:
    """Whether a path is inside one of these modules."""
    prefixes = tuple(f"{region}." for region in regions)
    return path.startswith(prefixes)


def find_sharded_modules(
    name: str, block: nn.Module, *, axes: AxisTable, rule: Rule
) -> ShardedModules:
    """The modules below a plain block that hold sharded parameters, by what becomes of them.

    Raises:
        PlanError: a linear or an embedding sharded along both dims, or a subclass of them whose forward a
            parallel one would replace.
    """
    search = _ModuleSearch(axes, rule)
    for path, module in block.named_modules():
        search.visit(path, module, name=path_below(name, path))
    inner_rows = [path for path in search.rows if is_below_any(path, search.regions)]
    rows = [path for path in search.rows if path not in inner_rows]
    return ShardedModules(
        columns=tuple(search.columns),
        rows=tuple(rows),
        inner_rows=tuple(inner_rows),
        embeddings=tuple(search.embeddings),
        regions=tuple(search.regions),
        experts=tuple(search.experts),
    )


@dataclass
class _ModuleSearch:
    """What was found of `ShardedModules` so far."""

    axes: AxisTable
    rule: Rule
    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    experts: list[ShardedExperts] = field(default_factory=list)

    def visit(self, path: str, module: nn.Module, *, name: str) -> None:
        """Note one module below the block; `name` is its global name."""
        has_weight = module._parameters.get("weight") is not None  # a parametrized one has none
        if isinstance(module, nn.Linear) and has_weight:
            self._visit_linear(path, module, key=f"{name}.weight")
        elif isinstance(module, nn.Embedding) and has_weight:
            self._visit_embedding(path, module, key=f"{name}.weight")
        elif expert_matrices(module):
            self._visit_experts(path, module, name=name)
        elif _declares_region(module) and self._holds_sharded(module, name):
            self.regions.append(path)

    def _visit_linear(self, path: str, module: nn.Linear, *, key: str) -> None:
        out_axis, in_axis = logical_axes(key, self.axes)
        is_column = sharded_over(out_axis, self.rule) == AXIS
        is_row = sharded_over(in_axis, self.rule) == AXIS
        if is_column and is_row:
            fault = Fault(key, "sharded along both dims over tp", got=f"{out_axis}, {in_axis}")
            raise PlanError(fault)
        if is_column or is_row:
            _check_class(module, LINEARS, key)
        if is_column:
            self.columns.append(path)
        if is_row:
            self.rows.append(path)

    def _visit_embedding(self, path: str, module: nn.Embedding, *, key: str) -> None:
        row_axis, feature_axis = logical_axes(key, self.axes)
        has_sharded_features = sharded_over(feature_axis, self.rule) == AXIS
        has_sharded_rows = sharded_over(row_axis, self.rule) == AXIS
        if has_sharded_rows and has_sharded_features:
            got = f"{row_axis}, {feature_axis}"
            raise PlanError(Fault(key, "sharded along both dims over tp", got=got))
        if has_sharded_rows or has_sharded_features:
            _check_options(module, key)
        if has_sharded_rows:  # one whose features are sharded computes on its part as it is
            _check_class(module, EMBEDDINGS, key)
            self.embeddings.append(path)

    def _visit_experts(self, path: str, module: nn.Module, *, name: str) -> None:
        for matrix in expert_matrices(module):
            for dim, axis in enumerate(logical_axes(f"{name}.{matrix}", self.axes)):
                if sharded_over(axis, self.rule) == AXIS:
                    self.experts.append(ShardedExperts(path, matrix, dim))

    def _holds_sharded(self, module: nn.Module, name: str) -> bool:
        for path, _ in module.named_parameters():
            for axis in logical_axes(f"{name}.{path}", self.axes):
                if sharded_over(axis, self.rule) == AXIS:
                    return True
        return False


def _declares_region(module: nn.Module) -> bool:
    return any(isinstance(child, RegionOutput) for child in module.children())


def _check_class(module: nn.Module, known: tuple[type[nn.Module], ...], key: str) -> None:
    """Reject a module that computes something else than the parallel one in its place would."""
    forwards = {cls.forward for cls in known}
    class_name = known[0].__name__
    if type(module).forward not in forwards or "forward" in vars(module):
        own_name = type(module).__name__
        fault = Fault(
            key,
            f"{own_name} overrides {class_name}.forward, and a parallel one would replace it",
            fix=f"use nn.{class_name}, or name axes that are not sharded",
        )
        raise PlanError(fault)
    for attribute in HOOKS:
        hooks = getattr(module, attribute).values()
        if any(hook is not drop_batch for hook in hooks):
            fault = Fault(
                key,
                f"this {class_name} has hooks, and the parallel one that replaces it would not run them",
                fix="register them on the module around it, or name axes that are not sharded",
            )
            raise PlanError(fault)


def _check_options(module: nn.Embedding, key: str) -> None:
    given: list[str] = []
    if module.max_norm is not None:
        given.append("max_norm")
    if module.scale_grad_by_freq or module.sparse:
        given.append("scale_grad_by_freq or sparse")
    if given:
        fault = Fault(
            key,
            "an embedding that is sharded over tp supports none of max_norm, scale_grad_by_freq, sparse",
            got=", ".join(given),
        )
        raise PlanError(fault)
