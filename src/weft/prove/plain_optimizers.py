"""Optimizer and learning rates of the one-device reference: which rule updates which parameter; not used in training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from weft.config.optimizers import AdafactorOptions, MuonOptions, options_of
from weft.config.schema import OptimConfig, OptimGroup
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import DimAxis, Stacked
from weft.prove.plain_codes import rounded_to_8_bits
from weft.prove.plain_rules import (
    Index,
    ParameterSettings,
    PlainAdafactor,
    PlainAdamW,
    PlainLion,
    PlainMuon,
    PlainRule,
    PlainSGD,
    PlainUpdate,
    TensorState,
    WholeUserRule,
)
from weft.train.optimizers.user_class import make_user_optimizer


class PlainOptimizer:
    """The optimizer that `optim` describes, on whole parameters, one after the other.

    Args:
        params: whole parameters by global name, which are updated in place.
        axes: their logical axes: some optimizers take fused projections apart.

    Attributes:
        state: parameter name -> key -> tensor.
    """

    def __init__(
        self, params: Mapping[str, Tensor], optim: OptimConfig, axes: AxisTable | None = None
    ) -> None:
        self.params = params
        self.optim = optim
        self.rules: dict[str, PlainRule] = {}
        self.settings: dict[str, ParameterSettings] = {}
        self.state: dict[str, TensorState] = {}
        for name, param in params.items():
            own_axes = () if axes is None else logical_axes(name, axes)
            settings = self._settings(name, param, own_axes)
            rule = self._rule(settings.optimizer)
            self.settings[name] = settings
            self.state[name] = rule.fresh_state(param)

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update every parameter."""
        for name, param in self.params.items():
            settings = self.settings[name]
            update = PlainUpdate(
                param,
                gradients[name],
                self.state[name],
                lr=lr * settings.lr_scale,
                settings=settings,
            )
            rule = self._rule(settings.optimizer)
            rule.update(update)
            if settings.state_block:
                for key, value in self.state[name].items():
                    if value.shape == param.shape:
                        value.copy_(rounded_to_8_bits(key, value, settings.state_block))

    def _rule(self, name: str) -> PlainRule:
        if name not in self.rules:
            self.rules[name] = plain_rule(name, self.optim)
        return self.rules[name]

    def _settings(self, name: str, param: Tensor, axes: tuple[DimAxis, ...]) -> ParameterSettings:
        """The first group whose pattern matches decides; what it leaves out is that of the run."""
        optim = self.optim
        group = self._group(name)
        optimizer = group.optimizer or self._default_rule(name, param)
        lr_scale = group.lr_scale
        splits = True
        if optim.name == "muon":
            options = options_of(optim, "muon")
            assert isinstance(options, MuonOptions), "its own"
            splits = options.split_stacked
            if optimizer == "adamw":
                lr_scale = lr_scale * options.adamw_lr_scale
        decay = optim.weight_decay if param.dim() >= 2 else 0.0
        if group.weight_decay is not None:
            decay = group.weight_decay
        return ParameterSettings(
            optimizer,
            lr_scale=lr_scale,
            decay=decay,
            betas=group.betas or optim.betas,
            matrices=tuple(_matrices(param, axes, splits=splits)),
            state_block=self._state_block(group, name, param),
        )

    def _state_block(self, group: OptimGroup, name: str, param: Tensor) -> int:
        """Its group decides; else the run does, for matrices of at least 16 blocks that embed
        nothing.
        """
        optim = self.optim
        is_wanted = optim.state_dtype == "8bit" and not name.startswith("embed")
        is_wanted = is_wanted and param.dim() > 1 and param.numel() >= 16 * optim.state_block
        if group.state_dtype is not None:
            is_wanted = group.state_dtype == "8bit" and param.dim() > 0
        return optim.state_block if is_wanted else 0

    def _group(self, name: str) -> OptimGroup:
        for group in self.optim.groups:
            if fnmatchcase(name, group.match):
                return group
        return OptimGroup(match="*")

    def _default_rule(self, name: str, param: Tensor) -> str:
        """Muon, and users' rules of its kind, leave to AdamW what is no matrix of a layer."""
        rule = self._rule(self.optim.name)
        is_whole_matrix = isinstance(rule, PlainMuon)
        if isinstance(rule, WholeUserRule):
            is_whole_matrix = rule.rule.kind == "whole_matrix"
        is_outside = name.startswith(("embed", "head"))
        if is_whole_matrix and (is_outside or param.dim() not in (2, 3)):
            return "adamw"
        return self.optim.name


def plain_rule(name: str, optim: OptimConfig) -> PlainRule:
    """The rule that a name means."""
    match name:
        case "adamw":
            return PlainAdamW(optim.eps)
        case "sgd":
            return PlainSGD(optim.momentum)
        case "lion":
            return PlainLion()
        case "muon":
            muon = options_of(optim, name)
            assert isinstance(muon, MuonOptions), "its own"
            return PlainMuon(muon)
        case "adafactor":
            adafactor = options_of(optim, name)
            assert isinstance(adafactor, AdafactorOptions), "its own"
            return PlainAdafactor(adafactor)
    options = optim.options if name == optim.name else {}
    return WholeUserRule(make_user_optimizer(name, options))


def _matrices(param: Tensor, axes: tuple[DimAxis, ...], *, splits: bool) -> Iterator[Index]:
    """Places of the logical matrices: each expert, and each projection of a fused weight."""
    if param.dim() not in (2, 3):
        return
    choices: list[list[slice | int]] = []
    for dim, size in enumerate(param.shape):
        axis = axes[dim] if dim < len(axes) else None
        if param.dim() == 3 and dim == 0:
            of_dim: list[slice | int] = list(range(size))
        elif isinstance(axis, Stacked) and splits:
            of_dim = list(_projections(size, axis))
        else:
            of_dim = [slice(0, size)]
        choices.append(of_dim)
    yield from itertools.product(*choices)


def _projections(size: int, axis: Stacked) -> Iterator[slice]:
    """The parts of a dim, in proportion to their units."""
    total = sum(units for _, units in axis.parts)
    units_before = 0
    for _, units in axis.parts:
        units_after = units_before + units
        start = units_before * size // total
        stop = units_after * size // total
        yield slice(start, stop)
        units_before = units_after


def plain_learning_rate(step: int, optim: OptimConfig, total: int) -> float:
    """Rate of step `step` (from 0) of `total`: linear warm-up to `lr`, then the decay to the
    share `min_lr` of it."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.decay == "constant":
        return optim.lr
    low = optim.lr * optim.min_lr
    begin = float(optim.warmup)
    if optim.decay == "wsd":
        length_of_decay = optim.cooldown * total
        begin = max(begin, total - length_of_decay)
    if total > begin:
        done = (step - begin) / (total - begin)
        done = min(max(done, 0.0), 1.0)
    else:
        done = 1.0 if step >= total else 0.0
    left = 1.0 - done
    if optim.decay == "cosine":
        left = math.cos(math.pi * done / 2) ** 2
    return low + (optim.lr - low) * left
