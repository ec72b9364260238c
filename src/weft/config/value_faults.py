"""Faults and notes of values of the right type: texts without an encoding, a rate in place of a share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.keys import Flat
from weft.config.schema import OptimConfig
from weft.errors import Fault

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


def _is_surrogate(char: str) -> bool:
    """Whether Python reads a byte that it cannot decode as this character."""
    return "\ud800" <= char <= "\udfff"
