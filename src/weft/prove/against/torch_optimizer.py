"""AdamW and SGD of torch itself on whole parameters; other optimizers by weft's second formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from weft.config.schema import OptimConfig
from weft.core.model_config import AxisTable
from weft.prove.plain_optimizers import PlainOptimizer
from weft.prove.plain_rules import ParameterSettings


class WholeOptimizer(Protocol):
    """Updates whole parameters in place."""

    @property
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter -> key -> tensor."""
        ...

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update every parameter."""
        ...


class TorchOptimizer:
    """`torch.optim.AdamW` or `torch.optim.SGD`, a group for each parameter.

    Args:
        params: whole parameters by global name, updated in place.
        settings: of each: which rates and decay the config gives it.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim: OptimConfig,
        settings: Mapping[str, ParameterSettings],
    ) -> None:
        self.params = params
        self.settings = settings
        groups = []
        for name, param in params.items():
            own = settings[name]
            group = {"params": [param], "weight_decay": own.decay}
            if optim.name == "adamw":
                group["betas"] = own.betas
            groups.append(group)
        self.optimizer: torch.optim.Optimizer
        if optim.name == "adamw":
            self.optimizer = torch.optim.AdamW(groups, eps=optim.eps, foreach=False)
        else:
            self.optimizer = torch.optim.SGD(groups, momentum=optim.momentum, foreach=False)

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """As torch holds it; empty before the first step."""
        found = {}
        for name, param in self.params.items():
            states = self.optimizer.state[param]
            found[name] = {key: x for key, x in states.items() if isinstance(x, Tensor)}
        return found

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update every parameter."""
        for group, (name, param) in zip(
            self.optimizer.param_groups, self.params.items(), strict=True
        ):
            group["lr"] = lr * self.settings[name].lr_scale
            param.grad = gradients[name]
        self.optimizer.step()
        self.optimizer.zero_grad()


def whole_optimizer(
    params: Mapping[str, Tensor], optim: OptimConfig, axes: AxisTable
) -> tuple[WholeOptimizer, str]:
    """The optimizer of a run, and what computes it, for the report."""
    plain = PlainOptimizer(params, optim, axes)
    rules = {settings.optimizer for settings in plain.settings.values()}
    if any(settings.state_block for settings in plain.settings.values()):
        rules.add("states in 8 bits")
    if rules == {"adamw"}:
        return TorchOptimizer(params, optim, plain.settings), "torch.optim.AdamW"
    if rules == {"sgd"}:
        return TorchOptimizer(params, optim, plain.settings), "torch.optim.SGD"
    names = ", ".join(sorted(rules))
    return plain, f"weft's second formulas of {names}"
