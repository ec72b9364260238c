"""Optimizers and learning rates of the one-device reference, by their formulas; nothing here is used in training."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from weft.config.schema import OptimConfig
from weft.core.model_config import AxisTable, logical_axes
from weft.train.optim import make_optimizer

State = dict[str, dict[str, Tensor]]


class PlainAdamW:
    """AdamW on whole parameters, tensor by tensor. Source: Loshchilov and Hutter 2019, algorithm 2."""

    def __init__(self, params: Mapping[str, Tensor], optim: OptimConfig) -> None:
        self.params = params
        self.optim = optim
        self.state: State = {}
        for name, param in params.items():
            self.state[name] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update every parameter."""
        beta1, beta2 = self.optim.betas
        for name, param in self.params.items():
            gradient = gradients[name]
            state = self.state[name]
            state["step"] += 1
            count = float(state["step"])
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
            square.mul_(beta2).add_(gradient * gradient, alpha=1 - beta2)
            param.mul_(1 - lr * _decay(param, self.optim))
            corrected = square.sqrt() / math.sqrt(1 - beta2**count)
            param.sub_(lr / (1 - beta1**count) * mean / (corrected + self.optim.eps))


class PlainSGD:
    """Gradient descent with momentum on whole parameters; the decay is added to the gradient."""

    def __init__(self, params: Mapping[str, Tensor], optim: OptimConfig) -> None:
        self.params = params
        self.optim = optim
        self.state: State = {name: {} for name in params}
        if optim.momentum:
            for name, param in params.items():
                self.state[name]["momentum_buffer"] = torch.zeros_like(param)

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update every parameter."""
        for name, param in self.params.items():
            change = gradients[name] + _decay(param, self.optim) * param
            buffer = self.state[name].get("momentum_buffer")
            if buffer is not None:
                change = buffer.mul_(self.optim.momentum).add_(change)
            param.sub_(lr * change)


class WholeOptimizer:
    """An optimizer of weft on whole parameters: what it computes on shards is compared with that."""

    def __init__(self, params: Mapping[str, Tensor], optim: OptimConfig, axes: AxisTable) -> None:
        self.params = params
        matrices = frozenset(name for name, param in params.items() if param.dim() >= 2)
        self.optimizer = make_optimizer(
            params,
            optim,
            decay_names=matrices,
            logical_axes={name: logical_axes(name, axes) for name in params},
        )

    @property
    def state(self) -> State:
        """Parameter name -> key -> tensor."""
        return self.optimizer.state

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update every parameter."""
        for name, param in self.params.items():
            param.grad = gradients[name]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


PlainOptimizer = PlainAdamW | PlainSGD | WholeOptimizer


def plain_optimizer(
    params: Mapping[str, Tensor], optim: OptimConfig, axes: AxisTable
) -> PlainOptimizer:
    """The optimizer that `optim` describes.

    Args:
        axes: logical axes of the parameters: some optimizers take fused projections apart.
    """
    if optim.name == "adamw" and not optim.groups:
        return PlainAdamW(params, optim)
    if optim.name == "sgd" and not optim.groups:
        return PlainSGD(params, optim)
    return WholeOptimizer(params, optim, axes)


def _decay(param: Tensor, optim: OptimConfig) -> float:
    return optim.weight_decay if param.dim() >= 2 else 0.0


def plain_learning_rate(step: int, optim: OptimConfig, total: int) -> float:
    """Rate of step `step` (from 0) of `total`: linear warm-up to `lr`, then the decay to `min_lr`."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.decay == "constant":
        return optim.lr
    low = min(optim.min_lr, optim.lr)
    begin = float(optim.warmup)
    if optim.decay == "wsd":
        begin = max(begin, total - optim.cooldown * total)
    if total <= begin:
        done = 1.0 if step >= total else 0.0
    else:
        done = min(max((step - begin) / (total - begin), 0.0), 1.0)
    left = 1.0 - done
    if optim.decay == "cosine":
        left = math.cos(math.pi * done / 2) ** 2
    return low + (optim.lr - low) * left
