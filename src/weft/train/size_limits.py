"""Sizes from which on a training run handles tensors another way; a proof, whose tensors are small, takes smaller ones."""

from __future__ import annotations

from dataclasses import dataclass

from weft.checkpoint.state import MIN_SHARED_ENTRIES
from weft.parallel.zero.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class SizeLimits:
    """Limits of a training run.

    Attributes:
        shared_entries: of a stored tensor, from which on replicas share its writing.
        bucket_bytes: of gradients that are reduced together under ZeRO 0.
    """

    shared_entries: int = MIN_SHARED_ENTRIES
    bucket_bytes: int = BUCKET_BYTES


OWN_LIMITS = SizeLimits()
"""Of runs."""
