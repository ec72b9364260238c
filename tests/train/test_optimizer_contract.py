"""Optimizer classes of users: what the contract allows runs on every layout, and each violation is rejected in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.matrix.layouts import Case
from tests.train.optimizer_layouts import check
from weft.config.schema import OptimConfig, OptimGroup
from weft.errors import ConfigError
from weft.train.optimizers.groups import group_lines, group_names, unmatched_groups
from weft.train.optimizers.user_class import make_user_optimizer

pytestmark = pytest.mark.usefixtures("trusted_code")

CLASSES = """
import torch
import weft

settings = dict(lr=0.0, weight_decay=0.0)

class Signs(weft.Optimizer):
    states = {"momentum": "entries", "steps": "scalar"}

    def __init__(self, beta: float = 0.9):
        self.beta = beta

    def update(self, param, grad, state, *, lr, weight_decay):
        state["steps"] += 1
        state["momentum"].lerp_(grad, 1 - self.beta)
        param.mul_(1 - lr * weight_decay).sub_(lr * state["momentum"].sign() / state["steps"])

class Rows(weft.Optimizer):
    kind = "whole_matrix"

    def direction(self, grad, state):
        return grad

    def transform(self, matrix):
        return matrix / matrix.norm(dim=1, keepdim=True)

    def apply(self, param, direction, *, lr, weight_decay, shape):
        param.sub_(lr * direction)

class Scaled(weft.Optimizer):
    kind = "reductions"
    states = {"rows": "rows"}

    def update_with_sums(self, param, grad, state, *, entries, lr, weight_decay):
        (rows,) = yield [entries.rows(grad.square())]
        state["rows"].lerp_(rows, 0.1)
        param.sub_(lr * grad / (entries.spread(state["rows"]) + 1e-3).sqrt())

class Mixes(weft.Optimizer):
    def update(self, param, grad, state, *, lr, weight_decay):
        param.sub_(lr * grad / grad.norm())

class MixesInApply(Rows):
    def apply(self, param, direction, *, lr, weight_decay, shape):
        param.sub_(lr * direction / param.norm())

class ForgetsASum(weft.Optimizer):
    kind = "reductions"

    def update_with_sums(self, param, grad, state, *, entries, lr, weight_decay):
        yield [grad.sum()]
        param.sub_(lr * grad / grad.norm())

class AddsState(weft.Optimizer):
    def update(self, param, grad, state, *, lr, weight_decay):
        state["extra"] = grad.clone()
        param.sub_(lr * grad)

class ReplacesState(weft.Optimizer):
    states = {"momentum": "entries"}

    def update(self, param, grad, state, *, lr, weight_decay):
        state["momentum"] = grad.sum()
        param.sub_(lr * grad)

class ChangesOthers(weft.Optimizer):
    last = None

    def update(self, param, grad, state, *, lr, weight_decay):
        if self.last is not None:
            self.last.add_(1)
        self.last = param
        param.sub_(lr * grad)

class ChangesGradients(weft.Optimizer):
    def update(self, param, grad, state, *, lr, weight_decay):
        param.sub_(grad.mul_(lr))

class Returns(weft.Optimizer):
    def update(self, param, grad, state, *, lr, weight_decay):
        return param - lr * grad

class Draws(weft.Optimizer):
    def update(self, param, grad, state, *, lr, weight_decay):
        param.sub_(lr * grad * torch.rand(()))

class Raises(weft.Optimizer):
    def update(self, param, grad, state, *, lr, weight_decay):
        raise RuntimeError("no luck")

class WrongShape(Rows):
    def transform(self, matrix):
        return matrix.T

class OtherKind(weft.Optimizer):
    kind = "global"

class OtherAxes(weft.Optimizer):
    states = {"momentum": "rows"}

class Plain:
    pass
"""

VIOLATIONS = {
    "Mixes": "declares elementwise but mixes entries",
    "MixesInApply": "declares whole_matrix but mixes entries",
    "ForgetsASum": "declares reductions but mixes entries",
    "AddsState": "adds state 'extra' that it does not declare",
    "ReplacesState": "state 'momentum' has another shape than declared",
    "ChangesOthers": "changes a parameter that it was not called for",
    "ChangesGradients": "changes the gradient",
    "Returns": "does not change the parameter in place",
    "Draws": "gives other values for the same gradients the second time",
    "Raises": "raises RuntimeError: no luck",
    "WrongShape": "returns another shape from transform",
    "OtherKind": "declares the kind 'global'",
    "OtherAxes": "declares axes 'rows' of state 'momentum'",
    "Plain": "is no optimizer class",
    "Nowhere": "has no 'Nowhere'",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "rules.py"
    path.write_text(CLASSES)
    return path


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_class_that_violates_the_contract_is_rejected(file: Path, name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_user_optimizer(f"{file}:{name}", {})
    (fault,) = raised.value.faults
    assert VIOLATIONS[name] in str(fault)
    assert "\n" not in str(fault)


def test_options_are_the_arguments_of_the_constructor(file: Path) -> None:
    assert make_user_optimizer(f"{file}:Signs", {"beta": 0.5}).beta == 0.5  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="did you mean 'beta'"):
        make_user_optimizer(f"{file}:Signs", {"bet": 0.5})


@pytest.mark.parametrize("layout", ["dp2 tp2", "pp2 tp2"])
def test_a_users_elementwise_class_is_exact_on_layouts(file: Path, layout: str) -> None:
    zero = 3 if "dp" in layout else 0
    optim = OptimConfig(name=f"{file}:Signs", options={"beta": 0.7})
    check(Case(layout, layers=2, microbatches=2, zero=zero), optim)


@pytest.mark.parametrize("name", ["Rows", "Scaled"])
def test_a_users_class_of_matrices_is_exact_on_layouts(file: Path, name: str) -> None:
    groups = (OptimGroup(match="layer*.mlp.*", optimizer=f"{file}:{name}"),)
    optim = OptimConfig(
        name=f"{file}:{name}", groups=(*groups, OptimGroup(match="*", optimizer="lion"))
    )
    check(Case("dp2 tp2", layers=2, microbatches=2, zero=2), optim)


SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.tok.weight": (9, 4),
    "layer0.norm.weight": (4,),
    "layer0.mlp.up.weight": (8, 4),
    "layer0.experts.up": (3, 8, 4),
    "layer0.conv.weight": (3, 8, 4, 4),
    "head.proj.weight": (9, 4),
}
DECAY = tuple(name for name, shape in SHAPES.items() if len(shape) > 1)


def optimizers(optim: OptimConfig) -> dict[str, str]:
    found = {}
    for settings, names in group_names(optim, SHAPES, decay_names=DECAY).items():
        found.update(dict.fromkeys(names, settings.optimizer))
    return found


def test_muon_updates_matrices_and_stacks_outside_embedding_and_head() -> None:
    found = optimizers(OptimConfig(name="muon"))
    assert [name for name, optimizer in found.items() if optimizer == "muon"] == [
        "layer0.mlp.up.weight",
        "layer0.experts.up",
    ]


def test_patterns_override_which_parameters_muon_updates() -> None:
    groups = (
        OptimGroup(match="head.*", optimizer="muon"),
        OptimGroup(match="*experts*", optimizer="adamw"),
    )
    found = optimizers(OptimConfig(name="muon", groups=groups))
    assert found["head.proj.weight"] == "muon"
    assert found["layer0.experts.up"] == "adamw"


def test_muon_of_a_vector_is_rejected() -> None:
    groups = (OptimGroup(match="*norm*", optimizer="muon"),)
    with pytest.raises(ConfigError, match=r"layer0\.norm\.weight is no matrix"):
        optimizers(OptimConfig(name="muon", groups=groups))


def test_the_first_matching_group_applies_and_overlaps_are_printed() -> None:
    groups = (
        OptimGroup(match="layer0.*", lr_scale=0.5),
        OptimGroup(match="*norm*", weight_decay=0.3),
        OptimGroup(match="head*", betas=(0.5, 0.6)),
    )
    optim = OptimConfig(groups=groups)
    by_name = {}
    for settings, names in group_names(optim, SHAPES, decay_names=DECAY).items():
        by_name.update(dict.fromkeys(names, settings))
    norm = by_name["layer0.norm.weight"]
    assert norm.lr_scale == 0.5
    assert norm.weight_decay == 0.0
    assert by_name["head.proj.weight"].betas == (0.5, 0.6)
    lines = group_lines(optim, SHAPES, decay_names=DECAY)
    assert any("layer0.* and *norm* both match 1 parameter" in line for line in lines)
    (fault,) = unmatched_groups(optim, SHAPES)
    assert "an earlier group matches all parameters of this one" in fault.what
