"""Owns tensor parallelism: linears cut by column or by row, as the axis table says, and the boundaries around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.axes import Rule, span, span_sizes
from weft.core.mesh import Axis
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import sharded_over
from weft.errors import Fault, PlanError
from weft.models.common.lora import plus_adapter, take_adapter
from weft.parallel.expert import dispatch
from weft.parallel.tensor.region import Loan, Region, linear


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features cut over `axis`: no communication forward, input gradients summed backward.

    Each rank holds rows `span(out_features, n, i)` of W and of b and yields those output features. With
    `sequence_parallel` the input x_BSD is this rank's part of the sequence and is gathered first.
    Source: Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al. 2022 (sequence parallelism).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        comm: Comm,
        bias: bool = True,
        axis: Axis = "tp",
        gather_output: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        lo, hi = span(out_features, comm.degree(axis), comm.index(axis))
        self.weight = nn.Parameter(torch.empty(hi - lo, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hi - lo, device=device, dtype=dtype)) if bias else None
        self.out_features, self.gather_output = out_features, gather_output
        self.region = Region(comm, axis, sequence_parallel)
        self.loan: Loan | None = None
        take_adapter(self)
        _reset(self)

    @classmethod
    def adopt(cls, module: nn.Linear, region: Region, out_features: int) -> ColumnParallelLinear:
        """The linear whose already cut weight and bias `module` holds."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.weight, self.bias = cast(nn.Parameter, module.weight), module.bias
        self.out_features, self.gather_output, self.region, self.loan = out_features, False, region, None
        take_adapter(self, module)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x[..., in_features] -> y[..., this rank's out_features], or all of them with `gather_output`."""
        loan, self.loan = self.loan, None
        if loan is None:
            x, (loan,) = self.region.open(x, (self.weight,))
        y = plus_adapter(self, x, linear(x, loan, self.bias))
        if not self.gather_output:
            return y
        comm, axis = self.region.comm, self.region.axis
        return ops.gather_from_region(y, comm, axis, dim=-1, sizes=span_sizes(self.out_features, comm.degree(axis)))


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_i W_i^T, + b: input features cut over `axis`, outputs summed forward, identity backward.

    Each rank holds columns `span(in_features, n, i)` of W and takes those input features; the bias is whole and added once,
    after the sum. With `sequence_parallel` the sum is reduce-scattered along the sequence.
    Source: Shoeybi et al. 2019; Korthikanti et al. 2022.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        comm: Comm,
        bias: bool = True,
        axis: Axis = "tp",
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        lo, hi = span(in_features, comm.degree(axis), comm.index(axis))
        self.weight = nn.Parameter(torch.empty(out_features, hi - lo, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.region = Region(comm, axis, sequence_parallel)
        take_adapter(self)
        _reset(self)

    @classmethod
    def adopt(cls, module: nn.Linear, region: Region) -> RowParallelLinear:
        """The linear whose already cut weight and whole bias `module` holds."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.weight, self.bias, self.region = cast(nn.Parameter, module.weight), module.bias, region
        take_adapter(self, module)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x[..., this rank's in_features] -> y[..., out_features]."""
        y = self.region.leave(plus_adapter(self, x, nn.functional.linear(x, self.weight)))
        return y if self.bias is None else y + self.bias


def _reset(module: ColumnParallelLinear | RowParallelLinear) -> None:
    """nn.Linear's own initial distribution, by the local fan-in; `parallelize` draws by name instead."""
    if module.weight.is_meta:
        return
    bound = module.weight.shape[1] ** -0.5
    for param in module.parameters():
        nn.init.uniform_(param, -bound, bound)


@dataclass(frozen=True)
class Linears:
    """Names of the cut linears below one block: what enters where and what leaves where."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


def apply(name: str, block: nn.Module, *, comm: Comm, table: AxisTable, rule: Rule, sequence: bool) -> frozenset[str]:
    """Make the linears below `block` tensor parallel; their weights must have been cut already.

    Returns the names (global) of the parameters that are whole on each rank but meet only this rank's heads or features:
    their gradients are partial sums.

    Raises:
        PlanError: a linear cut along both dims, or one cut by row that no linear cut by column feeds.
    """
    region = Region(comm, "tp", sequence)
    bundles = tuple(dispatch.mixtures(block))
    linears = _find(name, block, table=table, rule=rule)
    parents = {**dict.fromkeys(bundles, ()), **_parents(name, linears, bundles)}
    for path in linears.columns:
        cut = ColumnParallelLinear.adopt(_linear(block, path), region, _linear(block, path).out_features)
        block.set_submodule(path, cut)
    for path in linears.rows:
        if _bundle(path, bundles) is None:
            block.set_submodule(path, RowParallelLinear.adopt(_linear(block, path), region))
    for mixture in dispatch.mixtures(block).values():
        dispatch.leave_with(mixture, region.leave)
    inside: set[str] = set()
    for parent, columns in parents.items():
        _share_entry(block, parent, columns, region)
        inside |= _inside(name, block, parent, linears.rows)
    return frozenset(inside)


def _find(name: str, block: nn.Module, *, table: AxisTable, rule: Rule) -> Linears:
    columns, rows = [], []
    for path, module in block.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        out_axis, in_axis = logical_axes(f"{name}.{path}.weight", table)
        cuts_out, cuts_in = sharded_over(out_axis, rule) == "tp", sharded_over(in_axis, rule) == "tp"
        if cuts_out and cuts_in:
            raise PlanError(Fault(f"{name}.{path}.weight", "cut along both dims over tp", got=f"{out_axis}, {in_axis}"))
        if cuts_out:
            columns.append(path)
        if cuts_in:
            rows.append(path)
    return Linears(tuple(columns), tuple(rows))


def _bundle(path: str, bundles: tuple[str, ...]) -> str | None:
    """The mixture that holds this linear: it is entered and left as a whole, see Note [A mixture is one region] in dispatch.py."""
    return next((bundle for bundle in bundles if path.startswith(f"{bundle}.")), None)


def _parents(name: str, linears: Linears, bundles: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The smallest modules that hold a row-cut linear and the column-cut ones that feed it -> those column-cut linears."""
    parents: dict[str, tuple[str, ...]] = {}
    for row in linears.rows:
        parent = f"{_bundle(row, bundles)}." if _bundle(row, bundles) is not None else row
        columns: tuple[str, ...] = ()
        while parent and not columns:
            parent = parent.rpartition(".")[0]
            columns = tuple(path for path in linears.columns if path.startswith(parent + "." if parent else ""))
        if not columns:
            raise PlanError(
                Fault(
                    f"{name}.{row}.weight", "its input features are cut over tp, but nothing before it yields them cut"
                )
            )
        parents[parent] = columns
    return parents


def _linear(block: nn.Module, path: str) -> nn.Linear:
    module = block.get_submodule(path)
    assert isinstance(module, nn.Linear), f"{path} was a linear a moment ago"
    return module


def _share_entry(block: nn.Module, parent: str, columns: tuple[str, ...], region: Region) -> None:
    """One entry for all column-cut linears below `parent`."""
    linears = [block.get_submodule(path) for path in columns]

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weights = [column.weight for column in linears]
        x, loans = region.open(args[0], weights)  # type: ignore[arg-type]
        for column, loan in zip(linears, loans, strict=True):
            column.loan = loan  # type: ignore[assignment]
        return (x, *args[1:])

    block.get_submodule(parent).register_forward_pre_hook(enter)


def _inside(name: str, block: nn.Module, parent: str, rows: tuple[str, ...]) -> set[str]:
    """Global names of the parameters inside a region; a row's bias is added outside, after the sum."""
    prefix = f"{parent}." if parent else ""
    below = (prefix + leaf for leaf, _ in block.get_submodule(parent).named_parameters())
    return {f"{name}.{path}" for path in below if path not in {f"{row}.bias" for row in rows}}
