"""Progress in bytes: lines of a log, a bar on a terminal, silence for little work."""

from __future__ import annotations

import io

import pytest

from weft.view.bar import MIN_BYTES_FOR_LINES, NUM_LINES, ByteProgress


class TerminalFile(io.StringIO):
    """A text file with the interface of a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_tenth():
    file = io.StringIO()
    total = 10 * MIN_BYTES_FOR_LINES
    with ByteProgress(file) as bar:
        for thousandth in range(1001):
            done = total * thousandth // 1000
            bar.show("tokens", done, total)
    tenth = 100 // NUM_LINES
    expected = [f"tokens: {percent}% of 167.8 MB" for percent in range(tenth, 101, tenth)]
    assert file.getvalue().splitlines() == expected


@pytest.mark.parametrize("total", [0, 1, MIN_BYTES_FOR_LINES - 1])
def test_little_work_prints_no_line(total):
    file = io.StringIO()
    with ByteProgress(file) as bar:
        bar.show("tokens", total, total)
    assert not file.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = TerminalFile()
    with ByteProgress(file) as bar:
        bar.show("tokens", 50, 100)
        bar.show("tokens", 100, 100)
    assert "tokens" in file.getvalue()
    assert "100/100 bytes" in file.getvalue()
