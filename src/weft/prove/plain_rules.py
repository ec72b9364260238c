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


@dataclass(frozen=True)
class PlainUpdate:
    """One update of a whole parameter, which changes the parameter and its state in place."""

    param: Tensor
    gradient: Tensor
    state: TensorState
    lr: float
    settings: ParameterSettings


class PlainRule(Protocol):
    """An update of one whole parameter."""

    def fresh_state(self, param: Tensor) -> TensorState:
        """State before the first step."""
        ...

    def update(self, given: PlainUpdate) -> None:
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

    def update(self, given: PlainUpdate) -> None:
        beta1, beta2 = given.settings.betas
        given.state["step"] += 1
        count = float(given.state["step"])
        mean = given.state["exp_avg"]
        square = given.state["exp_avg_sq"]
        mean.mul_(beta1).add_(given.gradient, alpha=1 - beta1)
        square.mul_(beta2).add_(given.gradient * given.gradient, alpha=1 - beta2)
        given.param.mul_(1 - given.lr * given.settings.decay)
        corrected = square.sqrt() / math.sqrt(1 - beta2**count)
        given.param.sub_(given.lr / (1 - beta1**count) * mean / (corrected + self.eps))


@dataclass(frozen=True)
class PlainSGD:
    """Gradient descent with momentum; the decay is added to the gradient."""

    momentum: float

    def fresh_state(self, param: Tensor) -> TensorState:
        return {"momentum_buffer": torch.zeros_like(param)} if self.momentum else {}

    def update(self, given: PlainUpdate) -> None:
        change = given.gradient + given.settings.decay * given.param
        if self.momentum:
            buffer = given.state["momentum_buffer"]
            change = buffer.mul_(self.momentum).add_(change)
        given.param.sub_(given.lr * change)


@dataclass(frozen=True)
class PlainLion:
    """Source: Chen et al. 2023, algorithm 2."""

    def fresh_state(self, param: Tensor) -> TensorState:
        return {"exp_avg": torch.zeros_like(param)}

    def update(self, given: PlainUpdate) -> None:
        beta1, beta2 = given.settings.betas
        average = given.state["exp_avg"]
        direction = (beta1 * average + (1 - beta1) * given.gradient).sign()
        average.copy_(beta2 * average + (1 - beta2) * given.gradient)
        given.param.copy_(given.param - given.lr * (direction + given.settings.decay * given.param))


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

    def update(self, given: PlainUpdate) -> None:
        options = self.options
        given.state["step"] += 1
        count = float(given.state["step"])
        smallest = options.eps[0] or torch.finfo(given.param.dtype).eps
        variance = self._variance(given.gradient, given.state, count, smallest)
        change = given.gradient / variance.clamp(min=smallest**2).sqrt()
        change_rms = _root_mean_square(change)
        relative = min(given.lr, 1 / math.sqrt(count)) * max(
            options.eps[1], _root_mean_square(given.param)
        )
        given.param.mul_(1 - given.lr * given.settings.decay)
        given.param.sub_(relative / max(1.0, change_rms / options.d) * change)

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

    def update(self, given: PlainUpdate) -> None:
        options = self.options
        average = given.state["momentum_buffer"]
        average.lerp_(given.gradient, 1 - options.momentum)
        direction = given.gradient.lerp(average, options.momentum) if options.nesterov else average
        given.param.mul_(1 - given.lr * given.settings.decay)
        for place in given.settings.matrices:
            change = self._orthogonal(direction[place])
            factor = self._rate_factor(*change.shape)
            given.param[place] -= given.lr * factor * change.to(given.param.dtype)

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

    def update(self, given: PlainUpdate) -> None:
        if self.rule.kind == "elementwise":
            self.rule.update_all(
                [given.param],
                [given.gradient],
                [given.state],
                lr=given.lr,
                weight_decay=given.settings.decay,
            )
        elif self.rule.kind == "whole_matrix":
            self._update_matrices(given)
        else:
            self._update_with_sums(given)

    def _update_matrices(self, given: PlainUpdate) -> None:
        direction = self.rule.direction(given.gradient, given.state)
        direction = direction.to(self.rule.gather_dtype(given.param.dtype))
        for place in given.settings.matrices:
            change = self.rule.transform(direction[place].clone())
            num_rows, num_columns = change.shape
            self.rule.apply(
                given.param[place],
                change,
                lr=given.lr,
                weight_decay=given.settings.decay,
                shape=(num_rows, num_columns),
            )

    def _update_with_sums(self, given: PlainUpdate) -> None:
        """One rank holds everything: its sums are the sums."""
        update = self.rule.update_with_sums(
            given.param.view(-1),
            given.gradient.reshape(-1),
            given.state,
            entries=ParamEntries.whole(tuple(given.param.shape)),
            lr=given.lr,
            weight_decay=given.settings.decay,
        )
        sums: Sequence[Tensor] = next(update)
        while True:
            try:
                sums = update.send([each.clone() for each in sums])
            except StopIteration:
                return
