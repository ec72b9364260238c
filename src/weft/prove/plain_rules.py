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
        state_block: entries of a row that share the scale of their states' 8 bits; 0: no 8 bits.
    """

    optimizer: str
    lr_scale: float
    decay: float
    betas: tuple[float, float]
    matrices: tuple[Index, ...] = ()
    state_block: int = 0


@dataclass(frozen=True)
class PlainUpdate:
    """One update of a whole parameter, which changes the parameter and its state in place."""

    param: Tensor
    gradient: Tensor
    state: TensorState
    lr: float
    settings: ParameterSettings

    @property
    def decay_factor(self) -> float:
        """Factor of the parameter by decoupled weight decay."""
        return 1 - self.lr * self.settings.decay


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
        gradient = given.gradient
        given.state["step"] += 1
        count = float(given.state["step"])
        mean = given.state["exp_avg"]
        mean.mul_(beta1)
        mean.add_(gradient, alpha=1 - beta1)
        square = given.state["exp_avg_sq"]
        square.mul_(beta2)
        square.add_(gradient * gradient, alpha=1 - beta2)
        given.param.mul_(given.decay_factor)
        corrected_root = square.sqrt() / math.sqrt(1 - beta2**count)
        rate = given.lr / (1 - beta1**count)
        given.param.sub_(rate * mean / (corrected_root + self.eps))


@dataclass(frozen=True)
class PlainSGD:
    """Gradient descent with momentum; the decay is added to the gradient."""

    momentum: float

    def fresh_state(self, param: Tensor) -> TensorState:
        return {"momentum_buffer": torch.zeros_like(param)} if self.momentum else {}

    def update(self, given: PlainUpdate) -> None:
        decay = given.settings.decay * given.param
        change = given.gradient + decay
        if self.momentum:
            buffer = given.state["momentum_buffer"]
            buffer.mul_(self.momentum)
            change = buffer.add_(change)
        given.param.sub_(given.lr * change)


@dataclass(frozen=True)
class PlainLion:
    """Source: Chen et al. 2023, algorithm 2."""

    def fresh_state(self, param: Tensor) -> TensorState:
        return {"exp_avg": torch.zeros_like(param)}

    def update(self, given: PlainUpdate) -> None:
        beta1, beta2 = given.settings.betas
        gradient = given.gradient
        average = given.state["exp_avg"]
        mixed = beta1 * average + (1 - beta1) * gradient
        next_average = beta2 * average + (1 - beta2) * gradient
        average.copy_(next_average)
        decay = given.settings.decay * given.param
        change = given.lr * (mixed.sign() + decay)
        given.param.copy_(given.param - change)


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
        smallest_root, smallest_scale = self.options.eps
        if not smallest_root:
            smallest_root = torch.finfo(given.param.dtype).eps
        given.state["step"] += 1
        count = float(given.state["step"])
        variance = self._variance(given.gradient, given.state, count, smallest_root)
        change = given.gradient / variance.clamp(min=smallest_root**2).sqrt()
        change_rms = _root_mean_square(change)
        scale = max(smallest_scale, _root_mean_square(given.param))
        relative_step = min(given.lr, 1 / math.sqrt(count)) * scale
        clipping = max(1.0, change_rms / self.options.d)
        given.param.mul_(given.decay_factor)
        given.param.sub_(relative_step / clipping * change)

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
        mean_of_rows = rows.mean(-2, keepdim=True)
        return rows * columns / mean_of_rows.clamp(min=smallest)


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
        momentum = self.options.momentum
        average = given.state["momentum_buffer"]
        average.lerp_(given.gradient, 1 - momentum)
        direction = average
        if self.options.nesterov:
            direction = given.gradient.lerp(average, momentum)
        given.param.mul_(given.decay_factor)
        for place in given.settings.matrices:
            change = self._orthogonal(direction[place])
            num_rows, num_columns = change.shape
            rate = given.lr * self._rate_factor(num_rows, num_columns)
            given.param[place] -= rate * change.to(given.param.dtype)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """U V^T of U S V^T, by an odd polynomial of degree 5 that is applied several times."""
        a, b, c = self.options.ns_coefficients
        num_rows, num_columns = matrix.shape
        is_tall = num_rows > num_columns
        x = matrix.to(torch.bfloat16)
        if is_tall:
            x = x.mT
        norm = x.norm().clamp(min=self.options.eps)
        x = x / norm
        for _ in range(self.options.ns_steps):
            gram = x @ x.mT
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        return x.mT if is_tall else x

    def _rate_factor(self, num_rows: int, num_columns: int) -> float:
        if self.options.adjust_lr_fn == "original":
            ratio = max(1.0, num_rows / num_columns)
            return math.sqrt(ratio)
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
        rule = self.rule
        gather_dtype = rule.gather_dtype(given.param.dtype)
        direction = rule.direction(given.gradient, given.state).to(gather_dtype)
        for place in given.settings.matrices:
            matrix = direction[place].clone()
            change = rule.transform(matrix)
            num_rows, num_columns = change.shape
            rule.apply(
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
            copies = [each.clone() for each in sums]
            try:
                sums = update.send(copies)
            except StopIteration:
                return
