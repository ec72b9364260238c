"""Attention across context-parallel ranks for tests: one `Attend` with the implementation of a variant."""

from __future__ import annotations

from typing import Any

from weft.comm.comm import Comm
from weft.core.sequence import Context
from weft.models.common.attention import Attend
from weft.parallel.context.attend import VARIANTS


def attend_across(variant: Context, comm: Comm, **requirements: Any) -> Attend:
    """An `Attend` with these requirements that the ranks along cp compute together."""
    attend = Attend(**requirements)
    attend.implementation = VARIANTS[variant](comm)
    return attend
