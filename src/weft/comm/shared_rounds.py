"""Rounds of one member in a shared segment: write the own half, publish it, and wait for the halves that are read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator
from functools import lru_cache

from weft.comm import futex
from weft.comm.shared_segment import KEEPS_ORDER, WORDS_OF_LINE, SharedSegment
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

NUM_YIELDS = 40

Steps = Generator[int, None, None]
"""A call as a generator: it writes the own half and yields the tag to publish it with, and is resumed when
the halves of all members may be read. Tags are equal on members that are in the same part of the same call.
"""


class UnequalCallsError(RuntimeError):
    """Members are in different calls, whose signatures were not compared first."""


class Rounds:
    """The rounds of one member.

    Attributes:
        index, size: place of this member, and number of members.
        number: of the current round; the first is 1.
        half: half of the slots in the current round.
        awaited: the first member that was not seen to have published the round; `size` if all were.
    """

    def __init__(self, segment: SharedSegment, index: int, size: int) -> None:
        self.segment = segment
        self.index, self.size = index, size
        self.everyone = range(size)
        self.half = 0
        self.awaited = size
        self.number = 0
        self._tag = 0

    def begin(self) -> int:
        """Begin the next round; the half that this member may write and then reads of all."""
        self.number += 1
        self.half = self.number & 1
        return self.half

    def publish(self, tag: int) -> None:
        """Let the others read this member's half; it has read theirs of the round before."""
        segment, index = self.segment, self.index
        segment.words[segment.headers[self.half][index]] = self._tag = tag
        self.awaited = 0
        if not KEEPS_ORDER:
            segment.fence()
        segment.words[WORDS_OF_LINE * index] = self.number
        futex.wake(segment.counters[index])

    def is_complete(self) -> bool:
        """Whether the halves of all members may be read.

        Raises:
            UnequalCallsError: one of them is in another call.
        """
        if self.awaited == self.size:
            return True
        segment = self.segment
        words = segment.words
        while words[WORDS_OF_LINE * self.awaited] >= self.number:
            self.awaited += 1
            if self.awaited == self.size:
                if not KEEPS_ORDER:
                    segment.fence()
                tags = [words[header] for header in segment.headers[self.half]]
                if tags.count(self._tag) < self.size:
                    raise UnequalCallsError("members called different operations, shapes or dtypes")
                return True
        return False

    def spin(self) -> bool:
        """Yield the core some times; whether the member that is waited for has published."""
        words, counter = self.segment.words, WORDS_OF_LINE * min(self.awaited, self.size - 1)
        for _ in range(NUM_YIELDS):
            if words[counter] >= self.number:
                return True
            os.sched_yield()
        return False

    def awaited_word(self) -> futex.SeenWord | None:
        """The counter of the member that is waited for; None if `is_complete` may find the round so."""
        if self.awaited == self.size:
            return None
        value = self.segment.words[WORDS_OF_LINE * self.awaited]
        if value >= self.number:
            return None
        return futex.SeenWord(self.segment.counters[self.awaited], value)

    def write_number(self, number: int) -> None:
        """A number for the others, beside the tag of the own half."""
        self.segment.words[self.segment.headers[self.half][self.index] + 1] = number

    def numbers(self) -> list[int]:
        """The numbers of all members."""
        words = self.segment.words
        return [words[header + 1] for header in self.segment.headers[self.half]]


@lru_cache(maxsize=1024)
def tag_of(signature: str) -> int:
    """The first tag of a call; those of its later rounds follow."""
    return zlib.crc32(comparable_text(signature).encode()) << 24
