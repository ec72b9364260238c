"""Rounds of one member in a shared segment: write the own half, publish it, and wait for the halves that are read."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from functools import lru_cache
from typing import NamedTuple

from weft.comm.shared_segment import WORDS_OF_LINE, SharedSegment
from weft.comm.signature import comparable_text

# Note [Rounds]
# All calls of a group are one sequence of rounds, the same on all members. In round r a member writes into half r % 2 of
# its slot, publishes r, waits until all have published r, and reads their halves. That it has read them is seen when it
# publishes r + 1: all do so before any of them writes into that half again, in round r + 2.
#
#     member 0   write half 0   publish 2  . . . . . . . . .  read half 0 of member 1    write half 1   publish 3
#     member 1                  write half 0   publish 2      read half 0 of member 0    . . .
#
# A rank that has written goes on with its program, until it waits for the call: others do not hold it up.


class BlockedCall(NamedTuple):
    """What a call waits for: that a member publishes a round."""

    member: int
    round_number: int


Steps = Generator[BlockedCall, None, None]
"""A call, as far as it can go without waiting; it yields what it waits for."""


class UnequalCallsError(RuntimeError):
    """Members are in different calls, whose signatures were not compared first."""


class Rounds:
    """The rounds of one member.

    Attributes:
        index, size: place of this member, and number of members.
        half: half of the slots in the current round.
    """

    def __init__(self, segment: SharedSegment, index: int, size: int) -> None:
        self.segment = segment
        self.index, self.size = index, size
        self.everyone = range(size)
        self.half = 0
        self._round = 0

    def begin(self) -> int:
        """Begin the next round; the half that this member may write and then reads of all."""
        self._round += 1
        self.half = self._round & 1
        return self.half

    def exchange(self, tag: int, number: int = 0) -> Steps:
        """Let the others read this member's half; return when those of all may be read.

        Args:
            tag: equal on all members that are in the same part of the same call.
            number: for the others, see `numbers`.

        Raises:
            UnequalCallsError: one of them is in another call.
        """
        segment, round_number = self.segment, self._round
        words = segment.words
        header = segment.header(self.index, self.half)
        words[header] = tag
        words[header + 1] = number
        segment.publish(self.index, round_number)
        for member in self.everyone:
            if words[WORDS_OF_LINE * member] < round_number:
                yield BlockedCall(member, round_number)
        segment.fence()
        for member in self.everyone:
            if words[segment.header(member, self.half)] != tag:
                raise UnequalCallsError("members called different operations, shapes or dtypes")

    def numbers(self) -> list[int]:
        """What all members have published beside their tags."""
        segment = self.segment
        return [segment.words[segment.header(place, self.half) + 1] for place in self.everyone]

    def has_published(self, blocked: BlockedCall) -> bool:
        """Whether a member has come as far as a call waits for."""
        return self.segment.words[WORDS_OF_LINE * blocked.member] >= blocked.round_number

    def num_published(self, member: int) -> int:
        """Rounds that a member has published."""
        count: int = self.segment.words[WORDS_OF_LINE * member]
        return count


@lru_cache(maxsize=1024)
def tag_of(signature: str) -> int:
    """The first tag of a call; those of its later rounds follow."""
    return zlib.crc32(comparable_text(signature).encode()) << 24
