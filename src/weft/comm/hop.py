"""One hop around a ring of ranks: a message to the rank some places on, and one from the rank as many places before."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.core.mesh import Axis


@dataclass(frozen=True)
class MessagePair:
    """Both messages of a hop, in flight."""

    sending: Work
    receiving: Work

    def wait(self) -> Tensor:
        """What was received."""
        self.sending.wait()
        return self.receiving.wait()


def start_hop(
    comm: Comm, axis: Axis, sent: Tensor, received: Tensor, *, step: int = 1
) -> MessagePair:
    """Send `sent` to the rank `step` places on, and receive from the one `step` places before.

    Neighbours start the two in opposite order: nothing deadlocks where both directions of a pair share
    one connection without tags.
    """
    num_ranks, index = comm.degree(axis), comm.index(axis)
    target = (index + step) % num_ranks
    source = (index - step) % num_ranks
    sends_first = _place_in_cycle(index, step, num_ranks) % 2 == 0
    # on a GPU one kernel carries both: one after the other, each would wait for the neighbour's
    with comm.grouped_messages():
        if sends_first:
            sending = comm.start_send(sent, axis, to=target)
            receiving = comm.start_recv(received, axis, source=source)
        else:
            receiving = comm.start_recv(received, axis, source=source)
            sending = comm.start_send(sent, axis, to=target)
    return MessagePair(sending, receiving)


def _place_in_cycle(index: int, step: int, num_ranks: int) -> int:
    """Hops of `step` from the smallest rank of the cycle that `index` lies on; `index` itself where
    step is 1.
    """
    at = index % gcd(step, num_ranks)
    place = 0
    while at != index:
        at = (at + step) % num_ranks
        place += 1
    return place
