"""Update rules of the one-device reference, each by its published formula on a whole parameter; not used in training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.config.optimizers import AdafactorOptions, MuonOptions
from weft.parallel.zero.param_entries import ParamEntries
from weft.train.optimizers.contract import Optimizer

TensorState = dict[str, Tensor]
Index = tuple[slice | int, ...]
"""Place of a matrix in a parameter."""


@dataclass(frozen=True)
class ParameterSettings:
    """What one parameter is updated with.

    Attributes:
        optimizer: name of the rule.
        lr_scale: factor of the run's learning rate.
        decay: weight decay per unit of learning rate.
        betas: decay rates of both moments.
        matrices: places of its logical matrices.
    """

    optimizer: str
    lr_scale: float
    decay: float
    betas: tuple[float, float]
    matrices: tuple[Index, ...] = ()


class PlainRule(Protocol):
    """An update of one whole parameter."""

    def fresh_state(self, param: Tensor) -> TensorState:
        """State before the first step."""
        ...

    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        """Change the parameter and its state in place."""
        ...


@dataclass(frozen=True)
class PlainAdamW:
    """Source: Loshchilov and Hutter 2019, algorithm 2."""

    eps: float

    def fresh_state(self, param: Tensor) -> TensorState:
        return {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }

    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        beta1, beta2 = settings.betas
        state["step"] += 1
        count = float(state["step"])
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).add_(gradient * gradient, alpha=1 - beta2)
        param.mul_(1 - lr * settings.decay)
        corrected = square.sqrt() / math.sqrt(1 - beta2**count)
        param.sub_(lr / (1 - beta1**count) * mean / (corrected + self.eps))


@dataclass(frozen=True)
class PlainSGD:
    """Gradient descent with momentum; the decay is added to the gradient."""

    momentum: float

    def fresh_state(self, param: Tensor) -> TensorState:
        return {"momentum_buffer": torch.zeros_like(param)} if self.momentum else {}

    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        change = gradient + settings.decay * param
        if self.momentum:
            buffer = state["momentum_buffer"]
            change = buffer.mul_(self.momentum).add_(change)
        param.sub_(lr * change)


@dataclass(frozen=True)
class PlainLion:
    """Source: Chen et al. 2023, algorithm 2."""

    def fresh_state(self, param: Tensor) -> TensorState:
        return {"exp_avg": torch.zeros_like(param)}

    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        beta1, beta2 = settings.betas
        average = state["exp_avg"]
        direction = (beta1 * average + (1 - beta1) * gradient).sign()
        average.copy_(beta2 * average + (1 - beta2) * gradient)
        param.copy_(param - lr * (direction + settings.decay * param))


@dataclass(frozen=True)
class PlainAdafactor:
    """Source: Shazeer and Stern 2018, algorithms 4 and 5, with the options of torch.optim.Adafactor."""

    options: AdafactorOptions

    def fresh_state(self, param: Tensor) -> TensorState:
        state = {"step": torch.zeros(())}
        if param.dim() < 2:
            state["variance"] = torch.zeros_like(param)
            return state
        state["row_var"] = torch.zeros_like(param[..., :1])
        state["col_var"] = torch.zeros_like(param[..., :1, :])
        return state

    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        options = self.options
        state["step"] += 1
        count = float(state["step"])
        smallest = options.eps[0] or torch.finfo(param.dtype).eps
        variance = self._variance(gradient, state, count, smallest)
        change = gradient / variance.clamp(min=smallest**2).sqrt()
        change_rms = _root_mean_square(change)
        relative = min(lr, 1 / math.sqrt(count)) * max(options.eps[1], _root_mean_square(param))
        param.mul_(1 - lr * settings.decay)
        param.sub_(relative / max(1.0, change_rms / options.d) * change)

    def _variance(
        self, gradient: Tensor, state: TensorState, count: float, smallest: float
    ) -> Tensor:
        """The second moment of each entry, of which matrices store means of rows and columns."""
        weight = count**self.options.beta2_decay
        squares = gradient * gradient
        if gradient.dim() < 2:
            _average(state["variance"], squares, weight)
            return state["variance"]
        rows = state["row_var"]
        columns = state["col_var"]
        _average(rows, squares.mean(-1, keepdim=True), weight)
        _average(columns, squares.mean(-2, keepdim=True), weight)
        return rows * columns / rows.mean(-2, keepdim=True).clamp(min=smallest)


def _average(kept: Tensor, new: Tensor, weight: float) -> None:
    kept.copy_(kept + weight * (new - kept))


def _root_mean_square(x: Tensor) -> float:
    return math.sqrt(float(x.double().square().mean()))


@dataclass(frozen=True)
class PlainMuon:
    """Source: Jordan et al. 2024; Liu et al. 2025. The iteration rounds to bfloat16 in the order of
    torch.optim.Muon, which is part of its result.
    """

    options: MuonOptions

    def fresh_state(self, param: Tensor) -> TensorState:
        return {"momentum_buffer": torch.zeros_like(param)}

    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        options = self.options
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - options.momentum)
        direction = gradient.lerp(average, options.momentum) if options.nesterov else average
        param.mul_(1 - lr * settings.decay)
        for place in settings.matrices:
            change = self._orthogonal(direction[place])
            factor = self._rate_factor(*change.shape)
            param[place] -= lr * factor * change.to(param.dtype)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """U V^T of U S V^T, by an odd polynomial of degree 5 that is applied several times."""
        a, b, c = self.options.ns_coefficients
        num_rows, num_columns = matrix.shape
        x = matrix.to(torch.bfloat16)
        if num_rows > num_columns:
            x = x.mT
        x = x / x.norm().clamp(min=self.options.eps)
        for _ in range(self.options.ns_steps):
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if num_rows > num_columns else x

    def _rate_factor(self, num_rows: int, num_columns: int) -> float:
        if self.options.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, num_rows / num_columns))
        return 0.2 * math.sqrt(max(num_rows, num_columns))


@dataclass(frozen=True)
class WholeUserRule:
    """A user's class, which is its own definition, on a whole parameter."""

    rule: Optimizer

    def fresh_state(self, param: Tensor) -> TensorState:
        return self.rule.fresh_state(param, tuple(param.shape))

    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        decay = settings.decay
        if self.rule.kind == "elementwise":
            self.rule.update_all([param], [gradient], [state], lr=lr, weight_decay=decay)
        elif self.rule.kind == "whole_matrix":
            self._update_matrices(param, gradient, state, lr, settings)
        else:
            self._update_with_sums(param, gradient, state, lr, decay)

    def _update_matrices(
        self,
        param: Tensor,
        gradient: Tensor,
        state: TensorState,
        lr: float,
        settings: ParameterSettings,
    ) -> None:
        direction = self.rule.direction(gradient, state)
        direction = direction.to(self.rule.gather_dtype(param.dtype))
        for place in settings.matrices:
            change = self.rule.transform(direction[place].clone())
            num_rows, num_columns = change.shape
            self.rule.apply(
                param[place],
                change,
                lr=lr,
                weight_decay=settings.decay,
                shape=(num_rows, num_columns),
            )

    def _update_with_sums(
        self, param: Tensor, gradient: Tensor, state: TensorState, lr: float, decay: float
    ) -> None:
        """One rank holds everything: its sums are the sums."""
        update = self.rule.update_with_sums(
            param.view(-1),
            gradient.reshape(-1),
            state,
            entries=ParamEntries.whole(tuple(param.shape)),
            lr=lr,
            weight_decay=decay,
        )
        sums: Sequence[Tensor] = next(update)
        while True:
            try:
                sums = update.send([each.clone() for each in sums])
            except StopIteration:
                return
