"""Messages of ranks that watch each other, as keys of the world's store: processes, questions, answers, the verdict.

process/1    the process of rank 1, written at its start
ask/1        the newest question to rank 1
answer/1     its newest answer
verdict      the hung rank, written once
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from weft.run.lock_holder import LockHolder
from weft.run.rank_status import Phase, RankSnapshot, WaitingCall

VERDICT = "verdict"
Result = TypeVar("Result")


class WatchStore(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself.

    Attributes:
        place: `step 120, backward of layer5`.
        stalled_s: how long it has made no progress.
        waiting: the call that it waits for; None if it computes.
        num_started: group -> calls of the group that it has started.
    """

    question: str
    place: str
    phase: Phase
    stalled_s: float
    waiting: WaitingCall | None
    num_started: dict[int, int]

    @staticmethod
    def of_rank(question: str, snapshot: RankSnapshot, *, stalled_s: float) -> Answer:
        """The answer of a rank to a question, from its own status."""
        return Answer(
            question=question,
            place=snapshot.place,
            phase=snapshot.phase,
            stalled_s=stalled_s,
            waiting=snapshot.waiting,
            num_started=snapshot.num_started,
        )

    def has_joined(self, call: WaitingCall) -> bool:
        """Whether the rank has started the call."""
        num_calls = self.num_started.get(call.group, 0)
        return num_calls > call.position

    def to_text(self) -> str:
        """The answer as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Answer:
        """The answer in the text of `to_text`."""
        stored: dict[str, Any] = json.loads(text)
        waiting = stored["waiting"]
        if waiting is not None:
            waiting["members"] = tuple(waiting["members"])
            stored["waiting"] = WaitingCall(**waiting)
        by_group: dict[str, int] = stored["num_started"]
        stored["num_started"] = {int(group): number for group, number in by_group.items()}
        return Answer(**stored)


@dataclass(frozen=True)
class StoredVerdict:
    """The hung rank, the error text, and the rank that has found it."""

    rank: int
    text: str
    by: int


class PeerMessages:
    """Messages of one rank.

    Every method raises RuntimeError when the store is lost.
    """

    def __init__(self, store: WatchStore, rank: int) -> None:
        self.is_silent = False
        """Whether the newest request has no answer yet, or the connection is lost."""
        self._store = store
        self._rank = rank
        self._num_questions = 0
        self._last_question = ""

    def post_process(self, process: LockHolder) -> None:
        """Say which process this rank is."""
        self._set(f"process/{self._rank}", json.dumps(asdict(process)))

    def process_of(self, rank: int) -> LockHolder | None:
        """The process of a rank; None while it is not known."""
        text = self._find(f"process/{rank}")
        return None if text is None else LockHolder.from_text(text)

    def host_of(self, rank: int) -> str:
        """Name of the machine of a rank; "" while it is not known."""
        process = self.process_of(rank)
        return process.host if process is not None else ""

    def new_question(self) -> str | None:
        """The newest question to this rank, if it was not read before."""
        question = self._find(f"ask/{self._rank}")
        if question is None or question == self._last_question:
            return None
        self._last_question = question
        return question

    def answer(self, answer: Answer) -> None:
        """Answer a question to this rank."""
        self._set(f"answer/{self._rank}", answer.to_text())

    def ask(self, rank: int) -> None:
        """Put a question to a rank."""
        self._num_questions += 1
        self._set(f"ask/{rank}", f"{self._rank} {self._num_questions}")

    def answer_of(self, rank: int) -> Answer | None:
        """The newest answer of a rank, to whichever question."""
        text = self._find(f"answer/{rank}")
        return None if text is None else Answer.from_text(text)

    def publish(self, verdict: StoredVerdict) -> None:
        """Store a verdict, unless there is one."""
        text = json.dumps(asdict(verdict))
        # the first one counts: two ranks that found each other would otherwise name two culprits
        self._request(partial(self._store.compare_set, VERDICT, "", text))

    def verdict(self) -> StoredVerdict | None:
        """The first verdict."""
        text = self._find(VERDICT)
        return None if text is None else StoredVerdict(**json.loads(text))

    def _set(self, key: str, value: str) -> None:
        self._request(partial(self._store.set, key, value))

    def _find(self, key: str) -> str | None:
        """The value of a key; None if it is not set."""
        has_value = self._request(partial(self._store.check, [key]))
        if not has_value:
            return None
        value = self._request(partial(self._store.get, key))
        return value.decode()

    def _request(self, request: Callable[[], Result]) -> Result:
        """The result of a request to the store."""
        # set before the request, which may not return: the other thread reads it meanwhile
        self.is_silent = True
        result = request()
        self.is_silent = False
        return result
