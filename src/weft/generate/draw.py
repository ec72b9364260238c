"""Owns the choice of a token from logits: on the CPU in float64, by (seed, sample, position), so that layouts agree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only so many likeliest tokens can be drawn; None: all.
        top_p: only the likeliest tokens that together have this probability, the one that crosses it included
            (Holtzman et al. 2020); taken of what top_k leaves.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1


class Place(NamedTuple):
    """What is drawn: which sample's token, at which position of its sequence."""

    sample: int
    position: int


def draw(logits_V: Tensor, sampling: Sampling, place: Place) -> int:
    """A token by its probability; equal arguments give equal tokens."""
    wide_V = logits_V.double().cpu()
    if sampling.temperature == 0:
        return int(wide_V.argmax())
    tokens, shares = _candidates(wide_V / sampling.temperature, sampling)
    sums = shares.cumsum(0)
    point = uniform(sampling.seed, place) * sums[-1]
    return int(tokens[min(int(torch.searchsorted(sums, point, right=True)), len(tokens) - 1)])


def _candidates(logits_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens that can be drawn and their shares, likeliest first where some cannot; of equal ones the first comes first."""
    if sampling.top_k is None and sampling.top_p >= 1:
        return torch.arange(len(logits_V)), logits_V.softmax(0)
    order = logits_V.argsort(descending=True, stable=True)[: sampling.top_k]
    shares = logits_V[order].softmax(0)
    num = int((shares.cumsum(0) - shares < sampling.top_p).sum())
    return order[:num], shares[:num]


def uniform(seed: int, place: Place) -> float:
    """A number in [0, 1) with 53 bits, of its own for each place; no generator, so no version of one decides."""
    digest = hashlib.sha256(f"draw:{seed}:{place.sample}:{place.position}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53
