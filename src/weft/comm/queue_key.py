"""`QueueKey`: which queue of a process carries a call, and its name in the store."""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

from weft.comm.backend_policy import policy_of
from weft.comm.transport import Call, Communicator

MAX_NAME_LENGTH = 40
"""Characters; longer lists of members are replaced by a hash in the name of a group."""


class QueueKey(NamedTuple):
    """Which queue carries a call.

    Attributes:
        kind: of a group of ranks; of its second communicator, for reductions; of an ordered pair,
            for messages; or of the messages of a group, where they travel on its communicator.
        ranks: world ranks of the group or the pair.
    """

    kind: Literal["group", "reductions of group", "pair", "messages of group"]
    ranks: tuple[int, ...]

    @staticmethod
    def of(call: Call) -> QueueKey:
        """The queue of a call."""
        if not call.is_p2p:
            return QueueKey.of_group(call.ranks, call.communicator)
        if policy_of(call.device.type).messages_on_axis_group:
            return QueueKey("messages of group", call.members)
        return QueueKey("pair", call.ranks)

    @staticmethod
    def of_group(ranks: tuple[int, ...], communicator: Communicator) -> QueueKey:
        """The queue of a communicator of a group."""
        if communicator == "reductions":
            return QueueKey("reductions of group", ranks)
        return QueueKey("group", ranks)

    @property
    def name(self) -> str:
        """Name of a queue, the same on all members; of bounded length, since keys of the store begin
        with it.
        """
        members = "-".join(map(str, self.ranks))
        if len(members) <= MAX_NAME_LENGTH:
            return f"{self.kind} {members}"
        digest = hashlib.sha256(members.encode())
        short_digest = digest.hexdigest()[:16]
        size = len(self.ranks)
        first = self.ranks[0]
        return f"{self.kind} of {size} from {first}, {short_digest}"
