"""The page that a run writes at its end: also after an error, never in the way of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_run import TINY
from weft.cli import main
from weft.errors import EXIT_FAILED, EXIT_OK
from weft.report import page
from weft.start.report_at_end import FILE, MODE_VARIABLE, report_at_end


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE_VARIABLE)


@pytest.mark.parametrize(
    ("words", "code", "badge"),
    [
        ((), EXIT_OK, "finished"),
        (("--optim.lr", "1e30", "--optim.warmup", "0"), EXIT_FAILED, "failed"),
    ],
)
def test_a_run_leaves_a_page_however_it_ends(
    words: tuple[str, ...], code: int, badge: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert main(["train", *TINY, "--steps", "3", "--out", str(out), *words]) == code
    assert f">{badge}</span>" in (out / FILE).read_text(encoding="utf-8")


def test_no_page_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", *TINY, "--steps", "1", "--out", str(out), "--report", "False"]
    assert main(words) == EXIT_OK
    assert not (out / FILE).exists()


def test_a_page_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(runs: object) -> str:
        raise ZeroDivisionError("no steps")

    monkeypatch.setattr(page, "report_page", fails)
    (tmp_path / "events.jsonl").touch()
    with report_at_end(tmp_path):
        pass
    err = capsys.readouterr().err
    assert err == f"warning: {tmp_path / FILE} is not written: ZeroDivisionError: no steps\n"


def test_ctrl_c_does_not_wait_for_a_page(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(KeyboardInterrupt), report_at_end(tmp_path):
        raise KeyboardInterrupt
    assert not (tmp_path / FILE).exists()
