"""Rules of single values of the right type: texts without an encoding, a rate in place of a share, optimizers and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from weft.config.keys import Flat, faults_of, keys_of
from weft.config.optimizers import OPTIONS, SYNONYMS, is_user_class
from weft.config.schema import OptimConfig, OptimGroup
from weft.errors import Fault, did_you_mean

MIN_LR = "optim.min_lr"
MIN_SHARE = 0.001
"""Smallest share above 0 of the learning rate at the end of its decay."""

USUAL_SHARE = 0.01
"""Smaller shares are seldom meant."""


def undecodable(asked: Mapping[str, Any]) -> Iterator[Fault]:
    """Faults of texts with bytes that the locale's encoding lacks: no file could record them."""
    for key, value in asked.items():
        if isinstance(value, str) and any(_is_surrogate(char) for char in value):
            yield Fault(
                key,
                "is not text in the encoding of this locale",
                got=ascii(value),
                need="UTF-8",
                fix="choose a name of plain letters, or export LANG=C.UTF-8",
            )


def rate_faults(asked: Flat) -> Iterator[Fault]:
    """A last rate so small that it is no share of the rate, but was the rate itself."""
    share = asked.get(MIN_LR)
    if not isinstance(share, float) or not 0 < share < MIN_SHARE:
        return
    fix = f"--{MIN_LR} 0.1, which is the default"
    rate = asked.get("optim.lr")
    if isinstance(rate, float) and MIN_SHARE < share / rate <= 1:
        fix = f"--{MIN_LR} {share / rate:g}, if {share:g} is the rate that you mean"
    need = f"0, or {MIN_SHARE} to 1"
    yield Fault(MIN_LR, "is a share of optim.lr", got=f"{share:g}", need=need, fix=fix)


def rate_notes(optim: OptimConfig) -> Iterator[str]:
    """A share that looks like a rate, which other programs have under this name: it lies below `lr`
    or is smaller than shares are.
    """
    share = optim.min_lr
    looks_like_rate = 0 < share < max(optim.lr, USUAL_SHARE)
    if optim.decay == "constant" or share == OptimConfig().min_lr or not looks_like_rate:
        return
    other = f"; --{MIN_LR} {share / optim.lr:.6g} ends it at {share:g}" if share < optim.lr else ""
    yield f"{MIN_LR} {share:g} is a share of optim.lr: the rate ends at {optim.last_lr:g}{other}"


def optimizer_faults(optim: OptimConfig) -> Iterator[Fault]:
    """What is wrong with the optimizer's name, its options and the groups, without its class and
    the parameters' names.
    """
    if not is_user_class(optim.name):
        yield from _name_faults("optim.name", optim.name)
        if optim.name in OPTIONS:
            yield from _option_faults(optim)
    for group in optim.groups:
        if group.optimizer is not None and group.optimizer != optim.name:
            yield from _name_faults("optim.groups", group.optimizer)
    yield from _hidden_groups(optim.groups)


def _name_faults(key: str, name: str) -> Iterator[Fault]:
    if name in OPTIONS:
        return
    fix = did_you_mean(name, OPTIONS)
    if name in SYNONYMS:
        fix = f"did you mean {SYNONYMS[name]!r}?"
    known = ", ".join(OPTIONS)
    yield Fault(
        key,
        "unknown optimizer",
        got=repr(name),
        need=f"one of {known}, or package.module:Class",
        fix=fix,
    )


def _option_faults(optim: OptimConfig) -> Iterator[Fault]:
    options = OPTIONS[optim.name]
    known = keys_of(options)
    for name in optim.options:
        if name not in known:
            if known:
                fix = did_you_mean(name, known)
            else:
                fix = f"{optim.name} has no options"
            yield Fault(f"optim.options.{name}", f"{optim.name} has no such option", fix=fix)
    values = {name: value for name, value in optim.options.items() if name in known}
    try:
        options.model_validate(values, strict=True)
    except ValidationError as error:
        for fault in faults_of(error, known):
            fix = fault.fix.replace("--", "--optim.options.")
            yield replace(fault, key=f"optim.options.{fault.key}", fix=fix)


def _hidden_groups(groups: tuple[OptimGroup, ...]) -> Iterator[Fault]:
    """Groups whose pattern an earlier group has, so that they apply to nothing."""
    seen: list[str] = []
    for group in groups:
        if group.match in seen:
            yield Fault(
                "optim.groups",
                "two groups have the same pattern, and the first match wins",
                got=repr(group.match),
                fix="join them, or remove one",
            )
        seen.append(group.match)


def _is_surrogate(char: str) -> bool:
    """Whether Python reads a byte that it cannot decode as this character."""
    return "\ud800" <= char <= "\udfff"
