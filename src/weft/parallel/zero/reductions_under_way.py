"""The reductions that have started and are not waited for yet: a few at a time, so that little memory is held.

Note [Reductions under way]
    Under ZeRO 2 and 3 a reduction holds the unsharded gradient of its group until it is waited for.
    So at most MAX_UNDER_WAY are under way: before another one begins, the oldest is waited for. The
    other ranks have started that one, or will before they need anything of this rank: see
    backward_order.py. Under ZeRO 0 and 1 the gradient stays allocated, so any number may be.
    Only without that order, where the backward is split, may a rank whose tokens do not use a
    parameter start it as late as the end of the step. Where ranks exchange tokens meanwhile (context
    and expert parallelism) a wait would be a deadlock. There a GPU keeps gradients allocated instead
    of waiting; a CPU waits for at most MOST_WAIT_S a step, and then does the same.
"""

from __future__ import annotations

import math
import time
from collections import deque

from weft.comm.backends import policy_of
from weft.comm.comm import Comm
from weft.core.dimension import token_exchange_axes
from weft.core.zero_stages import MAX_UNDER_WAY
from weft.parallel.zero.param_group import ParamGroup

MOST_WAIT_S = 1.0
"""Time of one step that may be spent waiting where the wait might not end."""
POLL_S = 0.0005


class ReductionsUnderWay:
    """Starts reductions and waits for the oldest ones. See Note [Reductions under way].

    Attributes:
        ordered_stages: stages whose reductions follow the order of backward_order.py.
    """

    def __init__(self, comm: Comm) -> None:
        self.ordered_stages: set[int] = set()
        self._groups: deque[ParamGroup] = deque()
        self._exchanges_tokens = comm.degree(token_exchange_axes()) > 1
        self._host_waits = not policy_of(comm.device.type).is_stream_ordered
        self._wait_left_s = MOST_WAIT_S

    def start(self, group: ParamGroup) -> None:
        """Start the reduction of a group, after the oldest ones under way."""
        while group in self._groups:  # of an earlier backward: wait for it, in the order of all
            self._groups.popleft().wait_reduce()
        most = math.inf if group.policy.keeps_unsharded_grad else MAX_UNDER_WAY
        while len(self._groups) >= most:
            oldest = self._groups[0]
            if not self._may_wait_for(oldest):
                break
            self._groups.popleft()
            oldest.wait_reduce()
        self._start_possible_replica_sums()
        group.start_reduce()
        self._groups.append(group)

    def start_replica_sums(self) -> None:
        """Start the sums over copies that are left, in the order of the reductions before them."""
        for group in self._groups:
            group.start_replica_sum()

    def _start_possible_replica_sums(self) -> None:
        """Start sums over copies: the reductions before them have had the time of a block, and they
        have that of the next one. Oldest first, so that every rank starts them in the same order:
        where a rank may not wait for one, those behind it are started later, too.
        """
        for group in self._groups:
            if not group.replicate_axes or not self._may_wait_for(group):
                return
            group.start_replica_sum()

    def _may_wait_for(self, group: ParamGroup) -> bool:
        """Whether the wait for a reduction ends whatever the other ranks do meanwhile."""
        if not self._exchanges_tokens or group.stage in self.ordered_stages:
            return True
        return self._host_waits and self._arrives_in_time(group)

    def _arrives_in_time(self, group: ParamGroup) -> bool:
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
