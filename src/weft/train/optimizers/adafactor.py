"""Adafactor: a second moment factored into rows and columns, and steps relative to the parameter, as torch.optim.Adafactor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from weft.train.optimizers.contract import Entries, Kind, Optimizer, State, StateAxes, Sums


class Adafactor(Optimizer):
    """Options and arithmetic of torch.optim.Adafactor; vectors have an unfactored second moment.

    Args:
        beta2_decay: the decay rate of the second moment at step t is 1 - t^beta2_decay.
        eps: smallest root of the second moment (0: the dtype's epsilon), and smallest root mean
            square of a parameter that scales its step.
        d: root mean square above which an update is clipped.

    Source: Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost".
    """

    kind: ClassVar[Kind] = "reductions"

    def __init__(
        self, *, beta2_decay: float = -0.8, eps: tuple[float, float] = (0.0, 1e-3), d: float = 1.0
    ) -> None:
        self.beta2_decay = beta2_decay
        self.eps = eps
        self.d = d

    def state_axes(self, ndim: int) -> Mapping[str, StateAxes]:
        if ndim < 2:
            return {"step": "scalar", "variance": "entries"}
        return {"step": "scalar", "row_var": "rows", "col_var": "columns"}

    def update_with_sums(
        self,
        param: Tensor,
        grad: Tensor,
        state: State,
        *,
        entries: Entries,
        lr: float,
        weight_decay: float,
    ) -> Sums:
        """Two rounds of sums: of squared gradients and parameters, then of the squared update."""
        size = math.prod(entries.shape)
        state["step"].add_(1)
        step = state["step"].double()
        squares = grad.square()
        own_sums = [param.square().sum()]
        if "row_var" in state:
            own_sums += [entries.rows(squares), entries.columns(squares)]
        param_sum, *gradient_sums = yield own_sums
        weight = step.pow(self.beta2_decay).to(param.dtype)
        if "row_var" in state:
            row_sum, column_sum = gradient_sums
            state["row_var"].lerp_(row_sum / entries.shape[-1], weight)
            state["col_var"].lerp_(column_sum / entries.shape[-2], weight)
            variance = self._product(state, entries)
        else:
            state["variance"].lerp_(squares, weight)
            variance = state["variance"].clone()
        smallest = self._smallest(param.dtype)
        update = variance.clamp_(min=smallest * smallest).rsqrt_().mul_(grad)
        (update_sum,) = yield [update.square().sum()]
        mean_square = param_sum.double() / size
        param_rms = mean_square.sqrt().clamp(min=self.eps[1])
        update_rms = (update_sum.double() / size).sqrt()
        rate = step.rsqrt().clamp(max=lr) * param_rms
        param.mul_(1 - lr * weight_decay)
        too_large = (update_rms / self.d).clamp(min=1.0)
        param.sub_(update.mul_(rate / too_large))

    def _product(self, state: State, entries: Entries) -> Tensor:
        """The second moment at each local entry: rows x columns / mean of the rows."""
        row_var = state["row_var"]
        col_var = state["col_var"]
        smallest = self._smallest(row_var.dtype)
        mean = row_var.mean(dim=-2, keepdim=True)
        mean = mean.clamp_(min=smallest).expand_as(row_var)
        rows = entries.spread(row_var)
        columns = entries.spread(col_var)
        means = entries.spread(mean)
        return rows.mul_(columns).div_(means)

    def _smallest(self, dtype: torch.dtype) -> float:
        return self.eps[0] or torch.finfo(dtype).eps
