"""Numbers of micro-batches that tests of schedules try: some by default, the others of 1 to 32 in `make slow`."""

from __future__ import annotations

import pytest

SOME = (*range(1, 10), 11, 13, 15, 16, 17, 32)
"""The small ones, those around 2p - 1 and 2p for 8 ranks, and the largest."""
OTHERS = tuple(number for number in range(1, 33) if number not in SOME)
MICROBATCHES = (
    pytest.param(SOME, id="some"),
    pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
)
