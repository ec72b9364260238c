"""The reductions that have started and are not waited for yet: a few at a time, so that little memory is held.

Note [Reductions under way]
    Under ZeRO 2 and 3 a reduction holds the unsharded gradient of its group until it is waited for.
    So at most MAX_UNDER_WAY are under way: before another one begins, the oldest is waited for.
    Another rank may start that one only at the end of its backward, if its tokens do not use a
    parameter. That is no problem while its backward needs nothing of this rank. Where the two
    exchange tokens in between (context and expert parallelism) it would be a deadlock: there the
    wait ends after MOST_WAIT_S, and for the rest of the step gradients stay allocated instead.
"""

from __future__ import annotations

import time
from collections import deque

from weft.core.dimension import token_exchange_axes
from weft.core.mesh import Mesh
from weft.parallel.zero.param_group import ParamGroup

MAX_UNDER_WAY = 2
"""Reductions under ZeRO 2 and 3; FSDP2 has one under way while the next group computes."""
MOST_WAIT_S = 1.0
"""Time of one step that may be spent waiting where the wait might not end."""
POLL_S = 0.0005


class ReductionsUnderWay:
    """Starts reductions and waits for the oldest ones. See Note [Reductions under way]."""

    def __init__(self, mesh: Mesh) -> None:
        self._groups: deque[ParamGroup] = deque()
        self._wait_is_limited = mesh.degree(token_exchange_axes()) > 1
        self._wait_left_s = MOST_WAIT_S

    def start(self, group: ParamGroup) -> None:
        """Start the reduction of a group, after the oldest ones under way."""
        while len(self._groups) >= MAX_UNDER_WAY:
            oldest = self._groups[0]
            if not self._may_wait_for(oldest):
                break
            self._groups.popleft()
            oldest.wait_reduce()
        group.start_reduce()
        self._groups.append(group)

    def _may_wait_for(self, group: ParamGroup) -> bool:
        """Whether the wait for a reduction ends whatever the other ranks do meanwhile."""
        if not self._wait_is_limited:
            return True
        start_s = time.monotonic()
        while not group.is_reduce_completed():
            waited_s = time.monotonic() - start_s
            if waited_s >= self._wait_left_s:
                self._wait_left_s = 0.0
                return False
            time.sleep(POLL_S)
        return True

    def clear(self) -> None:
        """All have been waited for: a new step begins."""
        self._groups.clear()
        self._wait_left_s = MOST_WAIT_S
