"""Which rank is hung, from the answers of the ranks that wait for each other.

rank 0   waits in all_reduce, no progress ---- asks rank 1 ---> waits in the same call: joined
                                          +--- asks rank 2 ---> waits in a recv from rank 3
                                               asks rank 3 ---> no answer: rank 3 is the culprit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from weft.run.peer_messages import Answer
from weft.run.rank_status import Phase, WaitingCall

ANSWER_S = 1.0
"""How long an answer may take; the question is asked this long before the limit."""

Ask = Callable[[int], Answer | None]
"""The answer of a rank; None: there is none."""


@dataclass(frozen=True)
class HungPeer:
    """A hung rank that others wait for.

    Attributes:
        text: what is wrong with it.
        call: the call for which others wait.
        relation: of the rank to the call: it has not joined it, or the data does not arrive.
    """

    rank: int
    text: str
    call: WaitingCall
    relation: Literal["missing", "stalled"] = "missing"


@dataclass(frozen=True)
class _Members:
    """Members of a call other than the one that waits in it.

    Attributes:
        joined: the answers of those that have joined it, up to the first one that has not.
        missing: the first one that has not joined.
        answer: that of the missing one; None: it gave none.
    """

    joined: Mapping[int, Answer]
    missing: int | None = None
    answer: Answer | None = None


@dataclass(frozen=True)
class PeerDiagnosis:
    """One search for a hung rank, by a rank that makes no progress.

    Attributes:
        rank: that searches.
        phase: of this rank.
        stalled_s: how long this rank has made no progress.
        ask: puts a question to a rank and waits for the answer.
        host_of: name of the machine of a rank.
        limit_s: how long data may not arrive in a phase.
        busy_limit_s: how long a rank may compute or sleep in a phase without progress.
        is_closing: whether this rank ends, so that answers no longer count.
    """

    rank: int
    phase: Phase
    stalled_s: float
    ask: Ask
    host_of: Callable[[int], str]
    limit_s: Callable[[Phase], float]
    busy_limit_s: Callable[[Phase], float]
    is_closing: Callable[[], bool]

    def find(self, call: WaitingCall) -> HungPeer | None:
        """Follow the ranks that `call` waits for; the first that is hung, or None."""
        path = [self.rank]
        while call.has_known_members:
            members = self._ask_members(call, waiting=path[-1])
            # then questions end without an answer, which is no sign of a hung rank
            if self.is_closing():
                return None
            rank = members.missing
            if rank is None:
                return self._check_arrival(call, members.joined, asked_by=path[-1])
            answer = members.answer
            if answer is None:
                text = f"no answer for {ANSWER_S:g} s: stopped, or its machine is unreachable"
                return HungPeer(rank, text, call)
            if answer.waiting is None:
                return self._check_progress(rank, answer, call)
            if rank in path:
                cycle = [*path[path.index(rank) :], rank]
                return _deadlock(cycle, answer, call)
            path.append(rank)
            call = answer.waiting
        return None

    def _ask_members(self, call: WaitingCall, *, waiting: int) -> _Members:
        """Ask the members of a call, up to the first one that has not joined it."""
        joined: dict[int, Answer] = {}
        for member in call.members:
            if member == waiting:
                continue
            answer = self.ask(member)
            if answer is None or not answer.has_joined(call):
                return _Members(joined, missing=member, answer=answer)
            joined[member] = answer
        return _Members(joined)

    def _check_progress(self, rank: int, answer: Answer, call: WaitingCall) -> HungPeer | None:
        """A finding on a rank that waits for nothing, if it makes no progress for too long."""
        if answer.stalled_s < self.busy_limit_s(answer.phase):
            return None
        text = f"{answer.place}: no progress for {answer.stalled_s:.1f} s"
        return HungPeer(rank, text, call)

    def _check_arrival(
        self, call: WaitingCall, answers: Mapping[int, Answer], *, asked_by: int
    ) -> HungPeer | None:
        """A finding on a call that all members have joined, if one of them is hung elsewhere, or if
        no data has arrived for longer than the limit.

        Args:
            answers: of the members other than `asked_by`.
        """
        if not answers:
            return None
        seconds = self.stalled_s
        for rank, answer in answers.items():
            if answer.waiting is None:
                return self._check_progress(rank, answer, call)
            seconds = min(seconds, answer.stalled_s)
        if seconds < self.limit_s(self.phase):
            return None
        own_host = self.host_of(asked_by)
        hosts = {rank: self.host_of(rank) for rank in answers}
        elsewhere = [rank for rank, host in hosts.items() if host != own_host]
        # a link between machines is cut more often than memory within one
        candidates = elsewhere or list(answers)
        culprit = candidates[0]
        text = (
            f"{answers[culprit].place}: all members have joined, but no data has arrived for "
            f"{seconds:.1f} s: the link between {hosts[culprit]} and {own_host} is cut, "
            "or data is lost"
        )
        return HungPeer(culprit, text, call, relation="stalled")


def _deadlock(cycle: list[int], answer: Answer, call: WaitingCall) -> HungPeer:
    """A finding on ranks that wait for each other; `cycle` ends with its first rank."""
    ranks = " -> ".join(f"rank {rank}" for rank in cycle)
    text = f"{answer.place}: deadlock, each waits for the next: {ranks}"
    return HungPeer(cycle[-1], text, call)
