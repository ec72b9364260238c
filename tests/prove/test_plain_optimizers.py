"""The reference's own update rules equal torch's optimizers, and users' classes on whole parameters, on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.config.schema import OptimConfig
from weft.core.shard import Stacked
from weft.prove.plain_optimizers import PlainOptimizer
from weft.train.optim import NamedOptimizer

Step = Callable[[Mapping[str, Tensor]], None]

pytestmark = pytest.mark.usefixtures("trusted_code")

TOLERANCE = 1e-12
STEPS = 3
LR = 0.02
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (7, 6),
    "layer0.norm.weight": (6,),
    "layer0.qkv.weight": (8, 6),
    "layer0.experts.up": (3, 4, 6),
    "head.weight": (7, 6),
}
AXES = {
    "*.norm.weight": (None,),
    "*.qkv.weight": (Stacked(("heads", 2), ("kv_heads", 1), ("kv_heads", 1)), None),
    "*.experts.up": ("experts", None, None),
    "embed.weight": (None, None),
    "head.weight": (None, None),
}
GROUPS = (
    {"match": "*norm*", "weight_decay": 0.3, "optimizer": "adamw", "betas": (0.7, 0.8)},
    {"match": "head*", "lr_scale": 0.5},
    {"match": "*", "weight_decay": 0.2},
)
OPTIMS: dict[str, dict[str, Any]] = {
    "adamw": {"eps": 1e-5, "betas": (0.8, 0.9)},
    "sgd": {"momentum": 0.7},
    "sgd without momentum": {"momentum": 0.0},
    "lion": {"betas": (0.8, 0.9)},
    "muon": {"options": {"adamw_lr_scale": 0.3}},
    "muon of fused weights": {
        "options": {"split_stacked": False, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    },
    "adafactor": {"options": {"d": 1.5, "beta2_decay": -0.6}},
}


def whole_parameters(seed: int) -> dict[str, Tensor]:
    """Random values by name, in float64."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = torch.randn(shape, dtype=torch.float64, generator=generator)
    return found


@dataclass(frozen=True)
class ByHand:
    """What OPTIMS and GROUPS say of a parameter, written out."""

    rule: str
    decay: float
    betas: tuple[float, float]
    lr: float = LR

    @staticmethod
    def of(name: str, optim: OptimConfig) -> ByHand:
        is_norm = "norm" in name
        is_outside = is_norm or name.startswith(("embed", "head"))
        rule = "adamw" if optim.name == "muon" and is_outside else optim.name
        found = ByHand(rule, 0.0 if is_norm else 0.1, optim.betas)
        if optim.groups and is_norm:
            found = ByHand("adamw", 0.3, (0.7, 0.8))
        elif optim.groups:
            is_head = name.startswith("head")
            found = replace(found, decay=0.1 if is_head else 0.2, lr=LR / 2 if is_head else LR)
        if optim.name == "muon" and found.rule == "adamw":
            return replace(found, lr=found.lr * optim.options.get("adamw_lr_scale", 1))
        return found


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, which torch does not have."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        for theta in group["params"]:
            m = self.state[theta].setdefault("m", torch.zeros_like(theta))
            c = beta1 * m + (1 - beta1) * theta.grad
            theta -= group["lr"] * (c.sign() + group["weight_decay"] * theta)
            m.copy_(beta2 * m + (1 - beta2) * theta.grad)


def torch_optimizer(settings: ByHand, optim: OptimConfig, tensor: Tensor) -> torch.optim.Optimizer:
    """torch's own optimizer of one tensor."""
    own: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.decay}
    options = optim.options
    match settings.rule:
        case "adamw":
            return torch.optim.AdamW([tensor], betas=settings.betas, eps=optim.eps, **own)
        case "sgd":
            return torch.optim.SGD([tensor], momentum=optim.momentum, **own)
        case "lion":
            return Lion([tensor], {"betas": settings.betas, **own})
        case "muon":
            given = {
                name: options[name] for name in ("nesterov", "adjust_lr_fn") if name in options
            }
            return torch.optim.Muon([tensor], **given, **own)
    return torch.optim.Adafactor([tensor], **options, **own)


def matrices(name: str, *, split: bool) -> tuple[Any, ...]:
    """Where the matrices of a parameter lie that Muon takes one by one."""
    if ".experts." in name:
        return (0, 1, 2)
    if ".qkv." in name and split:
        return (slice(0, 4), slice(4, 6), slice(6, 8))
    return (slice(None),)


def torch_step(optim: OptimConfig, params: Mapping[str, Tensor]) -> Step:
    """torch's own optimizers, each of one matrix or parameter."""
    parts = []
    for name, param in params.items():
        settings = ByHand.of(name, optim)
        split = optim.options.get("split_stacked", True)
        indices = matrices(name, split=split) if settings.rule == "muon" else (slice(None),)
        for index in indices:
            tensor = param[index]
            parts.append((name, index, tensor, torch_optimizer(settings, optim, tensor)))

    def step(gradients: Mapping[str, Tensor]) -> None:
        for name, index, tensor, optimizer in parts:
            tensor.grad = gradients[name][index].clone()
            optimizer.step()

    return step


def largest_difference(optim: OptimConfig, step: Step, params: Mapping[str, Tensor]) -> float:
    """Between parameters that the reference updates, and those that `step` updates."""
    own = whole_parameters(0)
    plain = PlainOptimizer(own, optim, AXES)
    for number in range(1, STEPS + 1):
        gradients = whole_parameters(number)
        plain.step(gradients, LR)
        step(gradients)
    errors = [(own[name] - param).abs().max() for name, param in params.items()]
    return float(max(errors))


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("title", OPTIMS)
def test_a_plain_rule_is_that_of_torch(title: str, has_groups: bool) -> None:
    values = {**OPTIMS[title], "groups": GROUPS if has_groups else ()}
    name = title.split()[0]
    optim = OptimConfig(name=name, weight_decay=0.1, **values)
    params = whole_parameters(0)
    assert largest_difference(optim, torch_step(optim, params), params) < TOLERANCE


CLASSES = """
import weft

class Entries(weft.Optimizer):
    states = {"momentum": "entries"}
    def update(self, param, grad, state, *, lr, weight_decay):
        state["momentum"].lerp_(grad, 0.1)
        param.mul_(1 - lr * weight_decay).sub_(lr * state["momentum"].sign())

class Matrices(weft.Optimizer):
    kind = "whole_matrix"
    def direction(self, grad, state):
        return grad
    def transform(self, matrix):
        return matrix / matrix.norm()
    def apply(self, param, direction, *, lr, weight_decay, shape):
        param.mul_(1 - lr * weight_decay).sub_(lr * direction)

class Rows(weft.Optimizer):
    kind = "reductions"
    def update_with_sums(self, param, grad, state, *, entries, lr, weight_decay):
        (size,) = yield [grad.square().sum()]
        param.mul_(1 - lr * weight_decay).sub_(lr * grad / size.sqrt())
"""


@pytest.mark.parametrize("name", ["Entries", "Matrices", "Rows"])
def test_a_users_class_updates_whole_parameters(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rules") / f"{name.lower()}_rules.py"
    path.write_text(CLASSES)
    optim = OptimConfig(name=f"{path}:{name}", weight_decay=0.1)
    params = whole_parameters(0)
    axes = {"layer0.qkv.weight": AXES["*.qkv.weight"]}
    other = NamedOptimizer(params, optim, logical_axes=axes)

    def step(gradients: Mapping[str, Tensor]) -> None:
        for each, param in params.items():
            param.grad = gradients[each].clone()
        for group in other.param_groups:
            group["lr"] = LR
        other.step()

    assert largest_difference(optim, step, params) < TOLERANCE
