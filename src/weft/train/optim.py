"""Optimizers (torch's kernels, state kept by parameter name) and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from weft.config.schema import OptimConfig

# Note [Why not torch.optim.AdamW itself]
# Its constructor imports torch._dynamo: 829 modules, 0.95 s and 70 MB before the first step of every run. The functions
# behind it (`torch.optim.adamw.adamw`, `torch.optim.sgd.sgd`) are the same kernels without that; and state by global
# name is what a checkpoint or another layout needs, where torch's state goes by position.
#
# `fused=True` is the fastest on the CPU too. Best of 30 steps of AdamW in float32, ms, measured on 1 (2) threads:
#
#                                       loop          foreach       fused
#     80 matrices 64x64, 20 vectors      2.6 ( 2.7)    1.6 ( 1.7)   0.4 (0.5)
#     80 matrices 256x256, 20 vectors   10.0 ( 8.1)   19.9 (15.2)   2.9 (2.1)
#     10 matrices 1024x1024             22.4 ( 9.5)   37.1 (23.5)   5.2 (2.9)
#
# and its result does not depend on how a parameter is cut into pieces, to the last bit. The fused SGD is not so (its
# vector body and its tail round differently), the plain loop is in float32 and float64: SGD takes that, 8.9 ms where
# fused takes 3.9 for the ten large matrices.

State = dict[str, Tensor]


class Optimizer(Protocol):
    """What a training step needs: set each group's "lr", then `step()`. torch's own optimizers fit
    too.
    """

    param_groups: list[dict[str, Any]]

    def step(self) -> object:
        """Update every parameter that has a gradient."""
        ...


class NamedOptimizer:
    """Parameters by global name, in two groups: those with weight decay, and the others.

    Attributes:
        param_groups: {"names", "lr", "weight_decay"}; `lr` is read at every step.
        state: parameter name -> torch's key ("exp_avg", ...) -> tensor; exists from the start,
            zero.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim: OptimConfig,
        *,
        decay_names: Collection[str],
    ) -> None:
        self.params = dict(params)
        self.state: dict[str, State] = {
            name: self.fresh_state(param) for name, param in self.params.items()
        }
        decayed = tuple(name for name in self.params if name in decay_names)
        others = tuple(name for name in self.params if name not in decay_names)
        self.param_groups: list[dict[str, Any]] = []
        for names, weight_decay in ((decayed, optim.weight_decay), (others, 0.0)):
            if names:
                self.param_groups.append(
                    {"names": names, "lr": optim.lr, "weight_decay": weight_decay}
                )

    def fresh_state(self, param: Tensor) -> State:
        """State of a parameter before the first step."""
        raise NotImplementedError

    def update(
        self,
        names: list[str],
        grads: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update these parameters by these gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            grads: dict[str, Tensor] = {}
            for name in group["names"]:
                grad = self.params[name].grad
                if grad is not None:
                    grads[name] = grad
            if grads:
                self.update(
                    list(grads),
                    list(grads.values()),
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                )

    def state_keys(self) -> frozenset[str]:
        """Keys of the state of every parameter."""
        return frozenset(self.fresh_state(torch.empty(1)))

    def states(self, names: list[str], key: str) -> list[Tensor]:
        """The state of one key of these parameters."""
        return [self.state[name][key] for name in names]


class AdamW(NamedOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), as
    `torch.optim.AdamW(fused=True)` computes it.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim: OptimConfig,
        *,
        decay_names: Collection[str],
    ) -> None:
        self.betas = optim.betas
        self.eps = optim.eps
        super().__init__(params, optim, decay_names=decay_names)

    def fresh_state(self, param: Tensor) -> State:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
        }

    def update(
        self,
        names: list[str],
        grads: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        adamw(
            [self.params[name] for name in names],
            grads,
            self.states(names, "exp_avg"),
            self.states(names, "exp_avg_sq"),
            [],
            self.states(names, "step"),
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )


class SGD(NamedOptimizer):
    """Gradient descent with momentum, as `torch.optim.SGD(foreach=False)` computes it: the decay is
    added to the gradient.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim: OptimConfig,
        *,
        decay_names: Collection[str],
    ) -> None:
        self.momentum = optim.momentum
        super().__init__(params, optim, decay_names=decay_names)

    def fresh_state(self, param: Tensor) -> State:
        if not self.momentum:
            return {}
        return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}

    def update(
        self,
        names: list[str],
        grads: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        buffers: list[Tensor | None] = [self.state[name].get("momentum_buffer") for name in names]
        sgd(
            [self.params[name] for name in names],
            grads,
            buffers,
            foreach=grads[0].device.type == "cuda",
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0,
            nesterov=False,
            maximize=False,
        )


OPTIMIZERS: dict[str, type[NamedOptimizer]] = {"adamw": AdamW, "sgd": SGD}


def make_optimizer(
    params: Mapping[str, Tensor],
    optim: OptimConfig,
    *,
    decay_names: Collection[str] | None = None,
) -> NamedOptimizer:
    """The optimizer that `optim` describes; weight decay applies to `decay_names` (default: the
    matrices).
    """
    if decay_names is None:
        decay_names = matrices(params)
    return OPTIMIZERS[optim.name](params, optim, decay_names=decay_names)


def matrices(params: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the parameters with two dims or more: weights and embeddings, not biases or norms."""
    return frozenset(name for name, param in params.items() if param.ndim >= 2)


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of step `step` (the first is 0) of a run of `total_steps`.

    ```
    lr      ┌───────╮            constant   stays at lr
           ╱         ╲           linear     straight down from the end of the warm-up
          ╱           ╲          cosine     half a cosine down from there
    min_lr             ╰─        wsd        stays at lr, straight down over the last `cooldown` of all steps
          warm-up   decay
    ```

    The warm-up rises linearly and reaches `lr` in its last step. `min_lr` is reached at
    `total_steps`, one step after the last, and held from there on. A `min_lr` above `lr` counts as
    `lr`, so the rate never rises after the warm-up.
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    min_lr = min(optim.min_lr, optim.lr)
    return min_lr + (optim.lr - min_lr) * _decay_factor(step, optim, total_steps)


def _decay_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Position of the rate between `min_lr` (0) and `lr` (1)."""
    if optim.decay == "constant":
        return 1.0
    start: float = optim.warmup
    if optim.decay == "wsd":
        start = max(start, total_steps * (1 - optim.cooldown))
    progress = _progress(step, start=start, end=total_steps)
    if optim.decay == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - progress


def _progress(step: int, *, start: float, end: float) -> float:
    """Fraction of the way from `start` to `end`, 0 to 1."""
    if start >= end:
        return float(step >= end)
    return min(max((step - start) / (end - start), 0.0), 1.0)
