"""Means and sums over a sharded width, as norms over all heads compute them: those of the whole width, by a sum over ranks.

Note [Statistics over ranks]
    A norm over all heads (OLMo 2) reads the results of a column-parallel linear, of which each rank has
    its own:

        q_BS(HK) ── square ── mean over HK ── rsqrt ── times q, times weight
                              own sum, then the sum over ranks

    Its own code runs. While it does, the functions below compute the statistic of the whole width. Each
    rank uses the statistic on its own entries, so the gradient of it is a partial sum, which is summed
    over ranks, too. Which calls are meant, the sharding trace has found: those of modules without
    children over a last dim that is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.comm import ops
from weft.parallel.autograd.tensor_functions import in_wide_type
from weft.parallel.tensor.region import Region

SumOverRanks = Callable[[Tensor], Tensor]
"""x[..., W] -> [..., 1], the sum over the whole width."""


@dataclass(frozen=True)
class Width:
    """A sharded last dim: how its entries are summed, and their number on all ranks."""

    total: SumOverRanks
    size: int

    def mean(self, x: Tensor) -> Tensor:
        """x[..., W] -> [..., 1]."""
        return self.total(x) / self.size


def sum_over_ranks(x: Tensor, region: Region) -> Tensor:
    """The sum over the last dim on all ranks, each of which uses it on its own entries."""
    own = x.sum(-1, keepdim=True)
    whole = ops.reduce_from_region(own, region.comm, region.axis)
    return ops.copy_to_region(whole, region.comm, region.axis)


def compute_over_ranks(module: nn.Module, widths: Sequence[int], region: Region) -> None:
    """Have a module compute its statistics over ranks; see Note [Statistics over ranks].

    Args:
        widths: as `Findings.statistics` has them.
    """
    degree = region.comm.degree(region.axis)

    def total(x: Tensor) -> Tensor:
        return sum_over_ranks(x, region)

    of_calls = tuple(Width(total, own * degree) if own else None for own in widths)

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls = iter(of_calls)
        with StatisticsMode(lambda _x: next(calls)):
            return type(module).forward(module, *args, **kwargs)

    module.forward = forward


def _mean(
    width: Width, x: Tensor, _dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    wide = in_wide_type(x) if dtype is None else x.to(dtype)
    found = width.mean(wide).to(dtype or x.dtype)
    return found if keepdim else found.squeeze(-1)


def _sum(
    width: Width, x: Tensor, _dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    wide = in_wide_type(x) if dtype is None else x.to(dtype)
    found = width.total(wide).to(dtype or x.dtype)
    return found if keepdim else found.squeeze(-1)


def _var(
    width: Width,
    x: Tensor,
    _dim: Any,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    if correction is None:
        correction = int(unbiased)
    wide = in_wide_type(x)
    squares = (wide - width.mean(wide)).square()
    found = (width.total(squares) / (width.size - correction)).to(x.dtype)
    return found if keepdim else found.squeeze(-1)


def _rms_norm(
    width: Width, x: Tensor, _shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    wide = in_wide_type(x)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = wide * torch.rsqrt(width.mean(wide.square()) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def _layer_norm(
    width: Width,
    x: Tensor,
    _shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _cudnn_enable: bool = True,
) -> Tensor:
    wide = in_wide_type(x)
    centered = wide - width.mean(wide)
    y = centered * torch.rsqrt(width.mean(centered.square()) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


STATISTICS: Mapping[Any, Callable[..., Tensor]] = {
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    torch.sum: _sum,
    torch.Tensor.sum: _sum,
    torch.var: _var,
    torch.Tensor.var: _var,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
}
"""Functions of torch that norms call -> what computes the same of a sharded width."""


class StatisticsMode(TorchFunctionMode):
    """While it is active, calls over a sharded last dim compute what they would of the whole one.

    Args:
        width_of: asked at each call over the last dim alone, in their order; None: it is whole.
    """

    def __init__(self, width_of: Callable[[Tensor], Width | None]) -> None:
        super().__init__()
        self.width_of = width_of

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of `func`."""
        kwargs = dict(kwargs or {})
        compute = STATISTICS.get(func)
        if compute is None:
            return func(*args, **kwargs)
        names = ("normalized_shape",) if compute in (_rms_norm, _layer_norm) else ("dim", "axis")
        x, *given = args if args else (kwargs.pop("input"),)
        for name in names:
            if name in kwargs:
                given.insert(0, kwargs.pop(name))
        width = self.width_of(x) if given and _is_last(x, given[0], names) else None
        if width is None:
            return func(x, *given, **kwargs)
        return compute(width, x, *given, **kwargs)


def _is_last(x: Tensor, named: Any, names: tuple[str, ...]) -> bool:
    """Whether a call is over the last dim alone."""
    each = tuple(named) if isinstance(named, tuple | list | torch.Size) else (named,)
    if names == ("normalized_shape",):
        return len(each) == 1
    return each in ((-1,), (x.dim() - 1,))
