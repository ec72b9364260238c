"""The reference's own update rules equal torch's optimizers, and users' classes on whole parameters, on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.config.schema import OptimConfig
from weft.core.shard import Stacked
from weft.prove.plain_optimizers import PlainOptimizer
from weft.train.optim import NamedOptimizer
from weft.train.reference_optimizer import reference_optimizer

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
        "options": {
            "split_stacked": False,
            "nesterov": False,
            "adjust_lr_fn": "match_rms_adamw",
        }
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


def largest_difference(optim: OptimConfig, other: Any, params: dict[str, Tensor]) -> float:
    """Between parameters that the reference updates, and those that `other` updates."""
    own = whole_parameters(0)
    plain = PlainOptimizer(own, optim, AXES)
    for step in range(1, STEPS + 1):
        gradients = whole_parameters(step)
        plain.step(gradients, LR)
        for name, param in params.items():
            param.grad = gradients[name].clone()
        for group in other.param_groups:
            group["lr"] = LR
        other.step()
    errors = [(own[name] - param).abs().max() for name, param in params.items()]
    return float(max(errors))


def logical(names: dict[str, Tensor]) -> dict[str, Any]:
    """Logical axes by name, where a dim is fused."""
    return {name: AXES["*.qkv.weight"] for name in names if ".qkv." in name}


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("title", OPTIMS)
def test_a_plain_rule_is_that_of_torch(title: str, has_groups: bool) -> None:
    values = {**OPTIMS[title], "groups": GROUPS if has_groups else ()}
    name = title.split()[0]
    optim = OptimConfig(name=name, weight_decay=0.1, **values)
    params = whole_parameters(0)
    other = reference_optimizer(optim, params, logical_axes=logical(params))
    assert largest_difference(optim, other, params) < TOLERANCE


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
    other = NamedOptimizer(params, optim, logical_axes=logical(params))
    assert largest_difference(optim, other, params) < TOLERANCE
