"""Owns the optimizers: torch's own kernels, with their state kept by parameter name."""

from __future__ import annotations

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
    """What a training step needs: set each group's "lr", then `step()`. torch's own optimizers fit too."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object:
        """Move every parameter that has a gradient."""
        ...


class NamedOptimizer:
    """Parameters by global name, in two groups: the ones that decay, and the rest.

    Attributes:
        param_groups: {"names", "lr", "weight_decay"}; `lr` is read at every step.
        state: by parameter name, then by torch's own name for it ("exp_avg", ...). There from the start, zero.
    """

    def __init__(self, params: Mapping[str, Tensor], optim: OptimConfig, *, decay_names: Collection[str]) -> None:
        self.params = dict(params)
        self.state: dict[str, State] = {name: self.fresh_state(param) for name, param in self.params.items()}
        decayed = tuple(name for name in self.params if name in decay_names)
        rest = tuple(name for name in self.params if name not in decay_names)
        self.param_groups: list[dict[str, Any]] = [
            {"names": names, "lr": optim.lr, "weight_decay": weight_decay}
            for names, weight_decay in ((decayed, optim.weight_decay), (rest, 0.0))
            if names
        ]

    def fresh_state(self, param: Tensor) -> State:
        """What is remembered of `param` before its first step."""
        raise NotImplementedError

    def update(self, names: list[str], grads: list[Tensor], *, lr: float, weight_decay: float) -> None:
        """Move these parameters along these gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            grads = {name: grad for name in group["names"] if (grad := self.params[name].grad) is not None}
            if grads:
                self.update(list(grads), list(grads.values()), lr=group["lr"], weight_decay=group["weight_decay"])

    def states(self, names: list[str], key: str) -> list[Tensor]:
        """One kind of state of these parameters."""
        return [self.state[name][key] for name in names]


class AdamW(NamedOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), as `torch.optim.AdamW(fused=True)` computes it."""

    def __init__(self, params: Mapping[str, Tensor], optim: OptimConfig, *, decay_names: Collection[str]) -> None:
        self.betas, self.eps = optim.betas, optim.eps
        super().__init__(params, optim, decay_names=decay_names)

    def fresh_state(self, param: Tensor) -> State:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
        }

    def update(self, names: list[str], grads: list[Tensor], *, lr: float, weight_decay: float) -> None:
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
    """Descent with momentum, as `torch.optim.SGD(foreach=False)` computes it: the decay goes into the gradient."""

    def __init__(self, params: Mapping[str, Tensor], optim: OptimConfig, *, decay_names: Collection[str]) -> None:
        self.momentum = optim.momentum
        super().__init__(params, optim, decay_names=decay_names)

    def fresh_state(self, param: Tensor) -> State:
        return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)} if self.momentum else {}

    def update(self, names: list[str], grads: list[Tensor], *, lr: float, weight_decay: float) -> None:
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
    params: Mapping[str, Tensor], optim: OptimConfig, *, decay_names: Collection[str] | None = None
) -> NamedOptimizer:
    """The optimizer that `optim` describes; `decay_names` (default: the matrices) feel weight decay."""
    return OPTIMIZERS[optim.name](params, optim, decay_names=matrices(params) if decay_names is None else decay_names)


def matrices(params: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the parameters with two dims or more: weights and embeddings, not biases or norms."""
    return frozenset(name for name, param in params.items() if param.ndim >= 2)
