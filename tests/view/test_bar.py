"""Owns the tests of the bar of a long piece of work."""

from __future__ import annotations

import io

import pytest

from weft.view.bar import LINES, SILENT_BYTES, Bar


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_tenth():
    file, total = io.StringIO(), 10 * SILENT_BYTES
    with Bar(file) as bar:
        for thousandth in range(1001):
            bar.show("tokens", total * thousandth // 1000, total)
    lines = file.getvalue().splitlines()
    assert lines == [f"tokens: {percent}% of 167.8 MB" for percent in range(100 // LINES, 101, 100 // LINES)]


@pytest.mark.parametrize("total", [0, 1, SILENT_BYTES - 1])
def test_small_work_is_not_worth_a_line(total):
    file = io.StringIO()
    with Bar(file) as bar:
        bar.show("tokens", total, total)
    assert not file.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with Bar(file) as bar:
        bar.show("tokens", 50, 100)
        bar.show("tokens", 100, 100)
    assert "tokens" in file.getvalue()
    assert "100/100 bytes" in file.getvalue()
