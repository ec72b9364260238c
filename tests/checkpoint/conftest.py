"""Fixtures of the checkpoint tests: fsync without effect where a test makes no claim about crashes."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module")
def fast_disk():
    """Flushing does nothing: the claim is about bytes, not about what survives a crash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
