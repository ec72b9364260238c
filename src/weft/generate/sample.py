"""Sampling of a token from logits, on the CPU in float64, by (seed, sample, position): the same on every layout."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.errors import WeftError


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only so many likeliest tokens can be sampled; None: all.
        top_p: only the likeliest tokens that together have this probability, the one that crosses
            it included (Holtzman et al. 2020); of those that top_k leaves.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1


class TokenPosition(NamedTuple):
    """Which token is sampled: the number of the sample, and the position in its sequence."""

    sample: int
    position: int


def sample_token(logits_V: Tensor, sampling: Sampling, at: TokenPosition) -> int:
    """A token by its probability; equal arguments give equal tokens.

    Raises:
        WeftError: a logit is NaN or infinite.
    """
    # the device decides no bit of what follows
    logits_V = logits_V.double().cpu()
    if not logits_V.isfinite().all():
        raise WeftError(
            f"sample {at.sample}, position {at.position}: the logits are not finite, so that no "
            "token has a probability. Fix: compute in a wider number type (--dtype float32)"
        )
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = logits_V / sampling.temperature
    tokens, probabilities = _candidates(scaled_V, sampling)
    cumulative = probabilities.cumsum(0)
    point = uniform(sampling.seed, at) * cumulative[-1]
    found = int(torch.searchsorted(cumulative, point, right=True))
    # a rounded point may lie at the end of the sum
    place = min(found, len(tokens) - 1)
    return int(tokens[place])


def _candidates(logits_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens that can be sampled and their probabilities; with top_k or top_p the likeliest first,
    of equal ones the first.
    """
    if sampling.top_k is None and sampling.top_p >= 1:
        return torch.arange(len(logits_V)), logits_V.softmax(0)
    by_likelihood = logits_V.argsort(descending=True, stable=True)
    tokens = by_likelihood[: sampling.top_k]
    probabilities = logits_V[tokens].softmax(0)
    # of what comes before, so that the token that crosses the bound is kept, and one always is
    probability_before = probabilities.cumsum(0) - probabilities
    is_kept = probability_before < sampling.top_p
    num_kept = int(is_kept.sum())
    return tokens[:num_kept], probabilities[:num_kept]


def uniform(seed: int, at: TokenPosition) -> float:
    """A number in [0, 1) with 53 bits, its own for each position; a hash, so that no generator's
    version matters.
    """
    text = f"draw:{seed}:{at.sample}:{at.position}"
    digest = hashlib.sha256(text.encode()).digest()
    first_64_bits = int.from_bytes(digest[:8], "big")
    first_53_bits = first_64_bits >> 11
    return first_53_bits * 2.0**-53
