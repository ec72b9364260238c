"""Column- and row-parallel linears (Megatron-LM)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.axes import span_sizes
from weft.core.mesh import Axis, axis_names
from weft.errors import Fault, PlanError
from weft.models.common.linear_products import PRODUCT, product_of, share_rows
from weft.models.common.lora import (
    bias_before_magnitude,
    has_adapter,
    magnitude_of,
    plus_adapter,
    take_adapter,
    with_magnitude,
)
from weft.parallel.autograd.holders import Holders
from weft.parallel.autograd.rank_part import MarkedLayer, plain
from weft.parallel.tensor.autocast import autocast
from weft.parallel.tensor.chunked_products import scattered_linear
from weft.parallel.tensor.region import DeferredWeight, HasWeight, Region, SharedEntries, linear
from weft.parallel.tensor.vocabulary_shard import VocabularyShard
from weft.parallel.tp import AXIS


class ColumnParallelLinear(MarkedLayer):
    """y = x W^T + b, output features sharded over `axis`: no communication forward, input gradients
    summed backward.

    Each rank holds rows `span(out_features, n, i)` of W and of b and yields those output features.
    With `sequence_parallel` the input x_BSD is this rank's part of the sequence and is gathered
    first. Where `parts` are given, out_features are those of several projections, one after the
    other (fused q, k, v, or gate and up): each rank holds and yields a span of each of them.
    Source: Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al. 2022 (sequence parallelism).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        comm: Comm,
        bias: bool = True,
        axis: Axis = AXIS,
        parts: tuple[int, ...] = (),
        gather_output: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        holders = _holders(comm, axis, 0, out_features, parts)
        local_out = sum(holders.own_sizes)
        self.weight = _new_param(local_out, in_features, device=device, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _new_param(local_out, device=device, dtype=dtype)
        self.parts = holders.parts
        self.gather_output = gather_output
        self.region = Region(comm, axis, sequence_parallel)
        self.entries: SharedEntries | None = SharedEntries(self.region)
        self.deferred: DeferredWeight | None = None
        self.readers: tuple[HasWeight, ...] = ()
        take_adapter(self)
        _reset(self)
        self.mark(("weight", "bias"), holders)

    @classmethod
    def from_linear(
        cls, module: nn.Linear, region: Region, entries: SharedEntries | None
    ) -> ColumnParallelLinear:
        """The linear whose weight and bias `module` holds, sharded already.

        `entries` are those of its block; None where its input is inside a region.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.weight = cast(nn.Parameter, module.weight)
        self.bias = module.bias
        self.parts = (module.out_features,)
        self.gather_output = False
        self.entries = entries
        self.region = region
        self.deferred = None
        self.readers = ()
        share_rows(module, largest_out=region.largest)
        vars(self)[PRODUCT] = product_of(module)
        take_adapter(self, module)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x[..., in_features] -> y[..., this rank's out_features], or all of them with
        `gather_output`.
        """
        bias = bias_before_magnitude(self)
        if bias is not None:
            bias = plain(bias)
        if self.entries is not None:
            x, deferred = self.entries.read(x, self, multiplies=True)
            y = linear(x, deferred, bias, product_of(self))
        elif self.deferred is not None:
            # the region's entry, at a `RegionInput`, has set it for this forward, and it is used once
            y = linear(x, self.deferred, bias, product_of(self))
            self.deferred = None
        else:
            y = product_of(self)(x, plain(self.weight), bias)
        y = with_magnitude(self, plus_adapter(self, x, y))
        if self.gather_output:
            return self._gathered(y)
        return y

    def vocabulary(self) -> VocabularyShard:
        """This rank's share of the output features, as entries of a vocabulary."""
        return VocabularyShard(self.region.comm, self.region.axis, self.out_features)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input and the weight of this rank's product, for one who computes it in another way."""
        if self.entries is not None:
            x, deferred = self.entries.read(x, self)
            return x, deferred.weight
        weight = plain(self.weight)
        if self.deferred is not None:
            weight = self.deferred.weight
            self.deferred = None
        return x, weight

    @property
    def out_features(self) -> int:
        """Output features of all ranks."""
        return sum(self.parts)

    def _gathered(self, y: Tensor) -> Tensor:
        """The output features of all ranks, projection after projection."""
        comm = self.region.comm
        axis = self.region.axis
        degree = comm.degree(axis)
        sizes_of_parts = [span_sizes(part, degree) for part in self.parts]
        own_sizes = [sizes[comm.index(axis)] for sizes in sizes_of_parts]
        gathered = [
            ops.gather_from_region(own, comm, axis, dim=-1, sizes=sizes)
            for own, sizes in zip(y.split(own_sizes, -1), sizes_of_parts, strict=True)
        ]
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered, -1)


class RowParallelLinear(MarkedLayer):
    """y = sum over ranks of x_i W_i^T, + b: input features sharded over `axis`, outputs summed
    forward, identity backward.

    Each rank holds columns `span(in_features, n, i)` of W and takes those input features; the bias
    is whole and added once, after the sum; it starts as the first rank's. With `sequence_parallel`
    the sum is reduce-scattered along the sequence, and the gradient of the bias is this rank's
    part: all-reduce it over `axis` before the optimizer steps. Where `parts` are given, in_features
    are those of several tensors, one after the other, of each of which a rank has a span.
    Source: Shoeybi et al. 2019; Korthikanti et al. 2022.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        comm: Comm,
        bias: bool = True,
        axis: Axis = AXIS,
        parts: tuple[int, ...] = (),
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        degree = comm.degree(axis)
        holders = _holders(comm, axis, 1, in_features, parts)
        local_in = sum(holders.own_sizes)
        self.weight = _new_param(out_features, local_in, device=device, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _new_param(out_features, device=device, dtype=dtype)
        self.region = Region(comm, axis, sequence_parallel)
        take_adapter(self)
        _reset(self)
        self.mark(("weight",), holders)
        if degree > 1 and self.bias is not None and not self.bias.is_meta:
            # whole, and drawn from each rank's own generator above
            comm.broadcast_(self.bias.data, axis, root=0)

    @classmethod
    def from_linear(cls, module: nn.Linear, region: Region) -> RowParallelLinear:
        """The linear whose weight, sharded already, and whole bias `module` holds."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.weight = cast(nn.Parameter, module.weight)
        self.bias = module.bias
        self.region = region
        share_rows(module, largest_in=region.largest)
        vars(self)[PRODUCT] = product_of(module)
        take_adapter(self, module)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x[..., this rank's in_features] -> y[..., out_features]."""
        if self.region.takes_chunks(x) and not has_adapter(self):
            y = scattered_linear(x, plain(self.weight), self.region.comm, self.region.axis)
        else:
            partial = product_of(self)(x, plain(self.weight), None)
            partial = plus_adapter(self, x, partial)
            y = self.region.leave(partial)
        if magnitude_of(self) is not None:
            return with_magnitude(self, y, self._sum_over_ranks)
        if self.bias is None:
            return y
        return y + autocast(self.bias)

    def _sum_over_ranks(self, squares: Tensor) -> Tensor:
        """Of each row, whose entries all ranks hold parts of."""
        return self.region.comm.all_reduce(squares, self.region.axis)


def _holders(comm: Comm, axis: Axis, dim: int, length: int, parts: tuple[int, ...]) -> Holders:
    """Who holds the weight of a linear.

    Raises:
        PlanError: parts that are not as long as the dim.
    """
    holders = Holders(comm, axis_names(axis), dim, parts or (length,))
    if holders.length != length:
        side = "in_features" if dim else "out_features"
        fault = Fault("parts", f"do not fit {side}", got=str(parts), need=f"a sum of {length}")
        raise PlanError(fault)
    return holders


def _new_param(
    *shape: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """A parameter without values yet."""
    values = torch.empty(shape, device=device, dtype=dtype)
    return nn.Parameter(values)


def _reset(module: ColumnParallelLinear | RowParallelLinear) -> None:
    """nn.Linear's own initial distribution, by the local fan-in; `parallelize` draws by name
    instead.
    """
    if module.weight.is_meta:
        return
    fan_in = module.weight.shape[1]
    bound = fan_in**-0.5
    for param in module.parameters():
        nn.init.uniform_(param, -bound, bound)
