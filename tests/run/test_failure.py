"""The root cause among failures of ranks, and the one-line error with its location that it becomes."""

from __future__ import annotations

import pickle

import pytest

from weft.core.mesh import Mesh
from weft.errors import CommError, CommTimeout, DataError, Fault, MismatchError
from weft.run.failure import (
    TRACE_VARIABLE,
    ErrorContext,
    RankFailure,
    describe_error,
    describe_exit,
    root_cause,
)

PIPE_BYTES = 1 << 16
GLOO_TEXT = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), "error"),
        (DataError(Fault("data", "empty")), "user"),
        (MismatchError("ranks disagree"), "error"),
        (CommTimeout("rank 2 did not come"), "secondary"),
        (CommError("rank 2 failed first"), "secondary"),
        (ConnectionResetError("reset"), "secondary"),
        (RuntimeError(GLOO_TEXT), "secondary"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
    ],
)
def test_errors_about_communication_are_secondary(error, kind):
    assert describe_error(raised(error), rank=1, at_s=0.0).kind == kind


def test_a_late_cause_comes_before_an_early_secondary_failure():
    secondary = RankFailure(0, "secondary", 1.0, "closed by peer")
    cause = RankFailure(3, "error", 2.0, "bad")
    assert root_cause([secondary, cause]) == cause
    assert root_cause([cause, secondary]) == cause


def test_among_failures_of_one_kind_the_earliest_is_the_cause():
    causes = [RankFailure(0, "error", 3.0, "x"), RankFailure(1, "user", 1.0, "x")]
    secondary = [RankFailure(2, "secondary", 0.2, "x"), RankFailure(3, "secondary", 0.1, "x")]
    assert root_cause([*causes, *secondary]).rank == 1
    assert root_cause(secondary).rank == 3


def test_a_failure_has_message_location_and_traceback():
    failure = describe_error(raised(ValueError("3 heads on 2 ranks")), rank=1, at_s=0.0)
    assert failure.text.startswith("ValueError: 3 heads on 2 ranks [test_failure.py:")
    assert failure.text.endswith(" in raised]")
    assert failure.trace.startswith("Traceback (most recent call last)")


def test_a_lost_connection_is_reported_without_the_advice_that_gloo_adds():
    advice = "This is typically caused by a remote worker crashing. Check the logs. GLHF! \N{BEACH WITH UMBRELLA}\ufe0f"
    error = raised(CommError(f"recv: lost rank 0 ({GLOO_TEXT}. {advice})"))
    text = describe_error(error, rank=1, at_s=0.0).text
    assert text.startswith(f"CommError: recv: lost rank 0 ({GLOO_TEXT}) [test_failure.py:")


def test_a_lone_surrogate_in_an_error_is_written_out():
    """A file name that is no UTF-8; stderr, events and traceback files take none."""
    failure = describe_error(raised(ValueError("bad \udcff name")), rank=1, at_s=0.0)
    assert failure.text.startswith("ValueError: bad \\udcff name [")
    assert (failure.text + failure.trace).encode()


def test_a_report_fits_into_a_pipe_that_is_not_read():
    error = raised(ValueError("€" * 10**6))
    failure = describe_error(error, rank=1, at_s=0.0)
    assert len(pickle.dumps(failure)) < PIPE_BYTES


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "process was killed by SIGKILL (out of memory?)"),
        (-11, "process was killed by SIGSEGV"),
        (-35, "process was killed by signal 35"),
        (1, "process exited with code 1 before its function returned"),
    ],
)
def test_a_rank_without_a_report_is_described_by_its_exit_code(code, text):
    assert describe_exit(code, rank=0, at_s=0.0).text == text


def test_a_traceback_is_saved_in_the_run_folder_or_shown_on_request(tmp_path, monkeypatch):
    failure = RankFailure(3, "error", 0.0, "ValueError: bad", "Traceback ...\nValueError: bad\n")
    mesh = Mesh.parse("pp2 dp2")
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    saved = ErrorContext(mesh, tmp_path).to_error(failure)
    hint = ErrorContext(mesh).to_error(failure)
    monkeypatch.setenv(TRACE_VARIABLE, "1")
    shown = ErrorContext(mesh, tmp_path).to_error(failure)

    path = tmp_path / "traceback-rank3.txt"
    assert str(saved) == f"rank 3 (pp1 dp1): ValueError: bad\n  traceback: {path}"
    assert path.read_text() == failure.trace
    assert (
        str(hint)
        == "rank 3 (pp1 dp1): ValueError: bad\n  traceback: set WEFT_TRACEBACK=1 and run again"
    )
    assert str(shown) == "rank 3 (pp1 dp1): ValueError: bad\nTraceback ...\nValueError: bad"


def test_a_user_error_has_no_traceback(monkeypatch):
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    data_error = DataError(Fault("data.source", "empty"))
    failure = describe_error(raised(data_error), rank=0, at_s=0.0)
    error = ErrorContext(Mesh.parse("dp2")).to_error(failure)
    assert (str(error), error.kind) == ("rank 0 (dp0): data.source: empty", "user")


def test_a_traceback_file_replaces_a_planted_link_and_needs_no_disk(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("keep")
    path = tmp_path / "traceback-rank1.txt"
    path.symlink_to(victim)
    failure = describe_error(raised(ValueError("bad")), rank=1, at_s=0.0)
    context = ErrorContext(Mesh.parse("pp2"), tmp_path)
    assert str(path) in str(context.to_error(failure))
    assert "ValueError: bad" in path.read_text()
    assert path.is_symlink() is False
    assert victim.read_text() == "keep"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.run.failure.replace_file", full)
    assert "No space left on device" in str(context.to_error(failure))
