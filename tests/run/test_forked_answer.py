"""Answers of forked processes: values, failures, ends without an answer, and readers in later forks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from weft.errors import Fault, PlanError
from weft.run.forked_answer import Answer, ForkedAnswer


@contextmanager
def answering(function: Callable[[], Answer]) -> Iterator[ForkedAnswer]:
    forked = ForkedAnswer(function)
    try:
        yield forked
    finally:
        forked.end()


def exit_now() -> NoReturn:
    os._exit(3)


def fail() -> NoReturn:
    raise ValueError("no kernel")


def reject() -> NoReturn:
    raise PlanError(Fault("mesh", "too large"))


def sleep() -> Answer:
    time.sleep(60)
    return {}


def test_a_long_answer_is_read_whole_and_again() -> None:
    long = {"numbers": list(range(100_000))}
    with answering(lambda: long) as forked:
        assert forked.wait() == long
        assert forked.poll(10) == long


def test_a_later_fork_reads_the_answer() -> None:
    with answering(lambda: {"step_s": 2.0}) as first, answering(first.wait) as second:
        assert second.wait() == {"step_s": 2.0}


def test_failures_are_answers() -> None:
    with answering(fail) as other, answering(reject) as own, answering(exit_now) as ended:
        assert other.wait() == {"failure": "ValueError: no kernel"}
        assert own.wait() == {"failure": "mesh: too large"}
        assert ended.wait() == {"failure": "its process has ended without an answer"}


def test_a_process_that_still_computes_has_no_answer_and_is_ended() -> None:
    with answering(sleep) as forked:
        assert forked.poll() is None
    assert not os.path.exists(f"/proc/{forked.pid}")
