"""Answers of functions for a run in the calling process: in a fork where it can compute, else in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.run.devices import fork_problem
from weft.run.forked_answer import Answer, ForkedAnswer, RunningAnswer, answer_of


@dataclass(frozen=True)
class AnswerHere:
    """An answer that this process has computed."""

    answer: Answer

    def wait(self) -> Answer:
        """The answer, which is there already."""
        return self.answer

    def poll(self, patience_s: float = 0.0) -> Answer | None:
        """The answer, which is there already."""
        return self.answer

    def end(self) -> None:
        """Do nothing: no process runs."""


def answer_here(function: Callable[[], Answer], *, niceness: int = 0) -> RunningAnswer:
    """The answer of a function, for a process that may have computed before: forks of one that has
    used several threads cannot compute, so it computes itself, and waits.
    """
    if fork_problem():
        return AnswerHere(answer_of(function))
    return ForkedAnswer(function, niceness=niceness)
