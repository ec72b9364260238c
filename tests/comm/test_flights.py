"""Waiting in slices: what a wait that runs out means."""

from __future__ import annotations

from datetime import timedelta

import pytest

from weft.comm.flights import Collective


class Late:
    """A work that is done between the end of the first wait and the look at it; `error` is what it ended with."""

    def __init__(self, error: str | None) -> None:
        self.error, self.num_waits = error, 0

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_is_done_just_after_a_wait_ran_out_is_done() -> None:
    """On a busy machine a thread may be held up between the two; such a run ended with "did not come within 600 s"."""
    assert Collective([Late(None)]).wait(0.01)


def test_a_collective_that_failed_just_after_a_wait_ran_out_says_why() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        Collective([Late("Connection closed by peer")]).wait(0.01)
