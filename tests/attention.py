"""Attention for tests: one `Attend` across context-parallel ranks, and blocks of few queries at sizes of tests."""

from __future__ import annotations

from typing import Any

import pytest

from weft.comm.comm import Comm
from weft.core import attention_choice
from weft.core.attention_choice import AttentionLimits
from weft.core.query_blocks import row_blocks
from weft.core.sequence import Context
from weft.models.common import attention, dropout_mode
from weft.models.common.attention import Attend
from weft.parallel.context.attend import VARIANTS


def attend_across(variant: Context, comm: Comm, **requirements: Any) -> Attend:
    """An `Attend` with these requirements that the ranks along cp compute together."""
    attend = Attend(**requirements)
    attend.implementation = VARIANTS[variant](comm)
    return attend


def small_blocks(monkeypatch: pytest.MonkeyPatch, *, queries: int) -> None:
    """Attention of any size is computed in blocks of this number of queries until the test ends."""
    limits = AttentionLimits(0, queries, most_scores=0, least_queries=queries, most_masked_pairs=0)
    monkeypatch.setattr(attention_choice, "LIMITS", {"cpu": limits, "cuda": limits})
    for module in (attention, dropout_mode):
        monkeypatch.setattr(module, "row_blocks", row_blocks.__wrapped__)
