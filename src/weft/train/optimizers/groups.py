"""Which optimizer updates which parameter, with which settings: the groups of a run, by parameter name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from weft.config.optimizers import (
    AdafactorOptions,
    MuonOptions,
    group_of,
    has_8_bits,
    is_user_class,
    muon_updates,
    options_of,
)
from weft.config.schema import OptimConfig, OptimGroup
from weft.errors import ConfigError, Fault, counted, did_you_mean
from weft.train.optimizers.adafactor import Adafactor
from weft.train.optimizers.contract import Optimizer
from weft.train.optimizers.elementwise import SGD, AdamW, Lion
from weft.train.optimizers.muon import Muon
from weft.train.optimizers.user_class import load_class, make_user_optimizer

Shapes = Mapping[str, tuple[int, ...]]
"""Global parameter name -> shape of the whole parameter."""


@dataclass(frozen=True)
class GroupSettings:
    """What the parameters of a group have in common.

    Attributes:
        optimizer: name of the optimizer.
        match: pattern that put them here; "": none did.
        lr_scale: factor of the run's learning rate.
        weight_decay: per unit of learning rate.
        betas: decay rates of both moments.
        state_block: entries of a block of states in 8 bits; 0: states are as parameters.
    """

    optimizer: str
    match: str
    lr_scale: float
    weight_decay: float
    betas: tuple[float, float]
    state_block: int = 0

    def __str__(self) -> str:
        matched = f"{self.match}: " if self.match else ""
        text = f"{matched}{self.optimizer}, weight decay {self.weight_decay:g}"
        if self.lr_scale != 1:
            text += f", lr x {self.lr_scale:g}"
        if self.state_block:
            text += ", states in 8 bits"
        return text


def group_names(
    optim: OptimConfig,
    shapes: Shapes,
    *,
    decay_names: Collection[str],
    owners: Mapping[str, str] | None = None,
) -> dict[GroupSettings, tuple[str, ...]]:
    """The groups of these parameters, with their names, in the order of their first parameter.

    Args:
        decay_names: parameters with weight decay where no group says otherwise.
        owners: tied parameter -> its owner, by whose name patterns and optimizers choose.

    Raises:
        ConfigError: an optimizer of matrices is asked to update a parameter of other dims.
    """
    found: dict[GroupSettings, list[str]] = {}
    for name, shape in shapes.items():
        if owners is None:
            owner = name
        else:
            owner = owners.get(name, name)
        settings = _settings(optim, owner, shape, decays=name in decay_names)
        found.setdefault(settings, []).append(name)
    return {settings: tuple(names) for settings, names in found.items()}


def _settings(
    optim: OptimConfig, name: str, shape: tuple[int, ...], *, decays: bool
) -> GroupSettings:
    index = group_of(name, optim.groups)
    if index is None:
        group = OptimGroup(match="-")
    else:
        group = optim.groups[index]
    optimizer = group.optimizer or default_optimizer(optim.name, name, len(shape))
    if needs_matrices(optimizer) and len(shape) not in (2, 3):
        what = f"{name} is no matrix, which {optimizer} updates"
        raise ConfigError(Fault("optim.groups", what, got=str(list(shape)), fix="optimizer=adamw"))
    decay = optim.weight_decay if decays else 0.0
    lr_scale = group.lr_scale
    if optim.name == "muon" and optimizer == "adamw":
        options = options_of(optim, "muon")
        assert isinstance(options, MuonOptions), "muon's own"
        lr_scale *= options.adamw_lr_scale
    return GroupSettings(
        optimizer,
        match="" if index is None else group.match,
        lr_scale=lr_scale,
        weight_decay=decay if group.weight_decay is None else group.weight_decay,
        betas=group.betas or optim.betas,
        state_block=optim.state_block if has_8_bits(optim, group, name, shape) else 0,
    )


def default_optimizer(run_optimizer: str, name: str, ndim: int) -> str:
    """The optimizer of a parameter that no group names one for: the run's, and AdamW for what one
    of whole matrices does not update.
    """
    if needs_matrices(run_optimizer) and not muon_updates(name, ndim):
        return "adamw"
    return run_optimizer


def needs_matrices(optimizer: str) -> bool:
    """Whether an optimizer updates whole matrices: muon, or a user's class."""
    if is_user_class(optimizer):
        return load_class(optimizer).kind == "whole_matrix"
    return optimizer == "muon"


def make_rule(
    optim: OptimConfig, settings: GroupSettings, *, fixed_order: bool = False
) -> Optimizer:
    """The update rule of a group.

    Args:
        fixed_order: whether its bits may not depend on how parameters are sharded.
    """
    name = settings.optimizer
    if is_user_class(name):
        if name == optim.name:
            options = optim.options
        else:
            options = {}
        rule = make_user_optimizer(name, options)
        if settings.state_block and rule.kind == "reductions":
            what = f"{name} is of the kind reductions, whose states have no 8 bits"
            raise ConfigError(Fault("optim.state_dtype", what, got="8bit", need="params"))
        return rule
    if name == "adamw":
        return AdamW(betas=settings.betas, eps=optim.eps, fused=not fixed_order)
    if name == "lion":
        return Lion(betas=settings.betas)
    if name == "sgd":
        return SGD(momentum=optim.momentum)
    options_section = options_of(optim, name)
    if isinstance(options_section, AdafactorOptions):
        return Adafactor(
            beta2_decay=options_section.beta2_decay, eps=options_section.eps, d=options_section.d
        )
    assert isinstance(options_section, MuonOptions), name
    return Muon(
        momentum=options_section.momentum,
        nesterov=options_section.nesterov,
        ns_coefficients=options_section.ns_coefficients,
        ns_steps=options_section.ns_steps,
        eps=options_section.eps,
        adjust_lr_fn=options_section.adjust_lr_fn,
    )


def splits_stacked(optim: OptimConfig) -> bool:
    """Whether fused projections are separate matrices."""
    options = options_of(optim, "muon")
    assert isinstance(options, MuonOptions), "muon's own"
    return options.split_stacked


def unmatched_groups(optim: OptimConfig, names: Collection[str]) -> tuple[Fault, ...]:
    """Groups whose pattern matches none of the model's parameters, or only such that an earlier
    group matches.
    """
    faults = []
    used = {group_of(name, optim.groups) for name in names}
    for index, group in enumerate(optim.groups):
        if index in used:
            continue
        if matched(names, group):
            what = "an earlier group matches all parameters of this one"
            fix = "put the narrower pattern first"
        else:
            what = "the pattern matches no parameter"
            fix = did_you_mean(group.match, names)
            if not fix.startswith("did"):
                fix = f"names are {', '.join(_kinds_of(names))}" if names else ""
        faults.append(Fault("optim.groups", what, got=repr(group.match), fix=fix))
    return tuple(faults)


def _kinds_of(names: Iterable[str]) -> tuple[str, ...]:
    """Names of parameters, of all layers and experts once: `layer*.attn.q.weight`."""
    return tuple(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))


def group_lines(
    optim: OptimConfig, shapes: Shapes, *, decay_names: Collection[str]
) -> tuple[str, ...]:
    """The groups of a run in words, one line each, and patterns that overlap."""
    lines = []
    for settings, names in group_names(optim, shapes, decay_names=decay_names).items():
        lines.append(f"{settings}: {counted(len(names), 'parameter')}")
    for group, later in itertools.combinations(optim.groups, 2):
        both = matched(matched(shapes, group), later)
        if both:
            shared = counted(len(both), "parameter")
            lines.append(
                f"{group.match} and {later.match} both match {shared}, such as {both[0]}: "
                f"the first one applies"
            )
    return tuple(lines)


def matched(names: Iterable[str], group: OptimGroup) -> list[str]:
    """The names that a group's pattern matches."""
    return [name for name in names if group_of(name, (group,)) is not None]
