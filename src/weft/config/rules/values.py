"""Rules of single values of the right type: texts, paths, rates, meshes, sizes, optimizers with their options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from weft.config.keys import Flat, faults_of, keys_of
from weft.config.optimizers import OPTIONS, SYNONYMS, is_user_class
from weft.config.run_files import NAMES
from weft.config.schema import ModelSection, OptimConfig, OptimGroup
from weft.core.mesh import Mesh
from weft.errors import Fault, MeshError, did_you_mean

MIN_LR = "optim.min_lr"
MIN_SHARE = 0.001
"""Smallest share above 0 of the learning rate at the end of its decay."""

USUAL_SHARE = 0.01
"""Smaller shares are seldom meant."""
MAX_RANKS = 2**20
MAX_COUNTS = {"layers": 10_000, "first_k_dense": 10_000, "mtp_depth": 64, "experts": 2**16}
"""Largest numbers of parts of a model, each of which is planned on its own."""
MAX_SIZE = 2**31
"""Largest value of any other whole number of a model."""
WINDOWS_PATH = re.compile(r"[A-Za-z]:\\")
STEPS, EPOCHS = "steps", "epochs"


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


def unexpanded(values: Mapping[str, object]) -> Iterator[Fault]:
    """Paths with a variable that no shell has expanded, and paths of Windows.

    Args:
        values: dotted keys that were given.
    """
    for key in (*NAMES, "out", "resume"):
        value = values.get(key)
        if not isinstance(value, str) or os.path.exists(value):
            continue
        if "$" in value and (expanded := os.path.expandvars(value)) != value:
            yield Fault(key, "holds a variable", got=repr(value), fix=f"--{key} {expanded}")
        elif WINDOWS_PATH.match(value):
            fix = f"a path of this machine, such as --{key} {value[3:].replace(chr(92), '/')}"
            yield Fault(key, "is a path of Windows", got=repr(value), fix=fix)


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
        if group.state_dtype == "8bit" and (group.optimizer or optim.name) == "adafactor":
            yield _sums_in_8_bits("optim.groups", group.match)
    if optim.state_dtype == "8bit" and optim.name == "adafactor":
        yield _sums_in_8_bits("optim.state_dtype", "8bit")
    yield from _hidden_groups(optim.groups)


def _sums_in_8_bits(key: str, got: str) -> Fault:
    what = "adafactor keeps sums of rows and columns, which have no 8 bits"
    return Fault(key, what, got=got, need="params", fix="leave it out, or --optim.name adamw")


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


def length_is_said_once(*layers: Flat) -> Iterator[Fault]:
    """The length of a run is said in steps or in epochs; of file and flags, the flags say it."""
    for layer in layers:
        if {STEPS, EPOCHS} <= layer.keys():
            got = f"steps {layer[STEPS]} and epochs {layer[EPOCHS]}"
            what, fix = "says the length of the run, and so does steps", "one of the two"
            yield Fault(EPOCHS, what, got=got, fix=fix)


def mesh_can_be_read(text: str) -> Iterator[Fault]:
    """The text of a mesh says axes with degrees, and not too many ranks."""
    try:
        size = Mesh.parse(text).size
    except MeshError as error:
        yield from error.faults
        return
    if size > MAX_RANKS:
        got, need = f"{size} ranks", f"at most {MAX_RANKS}"
        yield Fault("mesh", "is too large", got=got, need=need, fix="smaller degrees")


def sizes_are_possible(model: ModelSection) -> Iterator[Fault]:
    """Sizes of a model that are absurd, found before anything is allocated."""
    default = type(model)()
    for name, value in model.architecture.items():
        limit = MAX_COUNTS.get(name, MAX_SIZE)
        if isinstance(value, int) and value > limit:
            yield Fault(
                f"model.{name}",
                "out of range",
                got=str(value),
                need=f"at most {limit}",
                fix=f"for example --model.{name} {getattr(default, name)}",
            )


def _is_surrogate(char: str) -> bool:
    """Whether Python reads a byte that it cannot decode as this character."""
    return "\ud800" <= char <= "\udfff"
