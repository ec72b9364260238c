"""Sizes from which on a training run handles tensors another way; a proof, whose tensors are small, takes smaller ones."""

from __future__ import annotations

from dataclasses import dataclass

from weft.checkpoint.state import MIN_SHARED_ENTRIES
from weft.core.attention_choice import AttentionLimits
from weft.parallel.zero.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class SizeLimits:
    """Limits of a training run.

    Attributes:
        shared_entries: of a stored tensor, from which on replicas share its writing.
        bucket_bytes: of gradients that are reduced together under ZeRO 0.
        attention: sizes of the parts of attention; None: those of the device.
    """

    shared_entries: int = MIN_SHARED_ENTRIES
    bucket_bytes: int = BUCKET_BYTES
    attention: AttentionLimits | None = None


OWN_LIMITS = SizeLimits()
"""Of runs."""
