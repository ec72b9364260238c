"""Claims about whose error is told: the cause before its echoes, in one line, with where it was raised."""

from __future__ import annotations

import pickle

import pytest

from weft.errors import CommError, CommTimeout, DataError, Fault, MismatchError
from weft.run.failure import Failure, describe, describe_exit, first_of, to_error


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


ECHO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), "error"),
        (DataError(Fault("data", "empty")), "user"),
        (MismatchError("ranks disagree"), "error"),
        (CommTimeout("rank 2 did not come"), "echo"),
        (CommError("rank 2 failed first"), "echo"),
        (ConnectionResetError("reset"), "echo"),
        (RuntimeError(ECHO), "echo"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
    ],
)
def test_errors_about_the_talk_between_ranks_are_echoes(error, kind):
    assert describe(raised(error), rank=1, at_s=0.0).kind == kind


def test_a_late_cause_comes_before_an_early_echo():
    echo, cause = Failure(0, "echo", 1.0, "closed by peer"), Failure(3, "error", 2.0, "bad")
    assert first_of([echo, cause]) == cause
    assert first_of([cause, echo]) == cause


def test_among_causes_and_among_echoes_the_clock_decides():
    causes = [Failure(rank, kind, at_s, "x") for rank, kind, at_s in ((0, "error", 3.0), (1, "user", 1.0))]
    echoes = [Failure(rank, "echo", at_s, "x") for rank, at_s in ((2, 0.2), (3, 0.1))]
    assert first_of([*causes, *echoes]).rank == 1
    assert first_of(echoes).rank == 3


def test_a_failure_says_what_and_where():
    failure = describe(raised(ValueError("3 heads on 2 ranks")), rank=1, at_s=0.0)
    assert failure.text.startswith("ValueError: 3 heads on 2 ranks [test_failure.py:")
    assert failure.text.endswith(" in raised]")
    assert failure.trace.startswith("Traceback (most recent call last)")


def test_a_report_fits_into_a_pipe_that_nobody_reads():
    failure = describe(raised(ValueError("€" * 10**6)), rank=1, at_s=0.0)
    assert len(pickle.dumps(failure)) < 1 << 16


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was killed by SIGKILL (out of memory?)"),
        (-11, "was killed by SIGSEGV"),
        (1, "ended with exit code 1 and said nothing"),
    ],
)
def test_a_rank_that_said_nothing_is_described_by_its_end(code, text):
    assert describe_exit(code, rank=0, at_s=0.0).text == text


def test_traceback_goes_to_the_run_folder_or_below_the_error_when_asked_for(tmp_path):
    failure = Failure(3, "error", 0.0, "ValueError: bad", "Traceback ...\nValueError: bad\n")
    kept = to_error(failure, "pp1 dp1", out=tmp_path, show_trace=False)
    path = tmp_path / "traceback-rank3.txt"
    assert str(kept) == f"rank 3 (pp1 dp1): ValueError: bad\n  traceback: {path}"
    assert path.read_text() == failure.trace
    shown = to_error(failure, "pp1 dp1", out=tmp_path, show_trace=True)
    assert str(shown) == "rank 3 (pp1 dp1): ValueError: bad\nTraceback ...\nValueError: bad"
    hint = to_error(failure, "pp1 dp1", out=None, show_trace=False)
    assert str(hint).endswith("\n  traceback: set WEFT_TRACEBACK=1 and run again")


def test_what_the_user_can_mend_needs_no_traceback():
    failure = describe(raised(DataError(Fault("data.source", "empty"))), rank=0, at_s=0.0)
    error = to_error(failure, "dp0", out=None, show_trace=False)
    assert (str(error), error.kind) == ("rank 0 (dp0): data.source: empty", "user")
