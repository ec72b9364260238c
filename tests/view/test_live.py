"""Views of a run: the live panel on terminals of any size, plain lines in pipes, quantities with units."""

from __future__ import annotations

import errno
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from weft.view.live import LiveView, open_view
from weft.view.plain import PlainView
from weft.view.progress import Progress, event_text, run_summary
from weft.view.quantity import clock, count, memory, short_time, sparkline
from weft.view.step_lines import round_up

RUN = {
    "event": "run",
    "layout": "pp2 dp2 tp2",
    "ranks": 8,
    "device": "cpu (gloo)",
    "model": "llama3-tiny",
    "params": 10_612_480,
    "data": {"source": "stdlib", "files": 455, "tokens": 8_794_125, "sha256": "306043984686"},
    "steps": 200,
    "seq_len": 128,
    "batch_size": 16,
}
HEADER = """\
╭─ weft ───────────────────────────────────────────────────────────────────────╮
│ layout     pp2 dp2 tp2, 8 ranks                                              │
│ device     cpu (gloo)                                                        │
│ model      llama3-tiny, 10.6 M parameters                                    │
│ data       stdlib, 455 files, 8.79 M tokens, sha256 306043984686             │
│ a step     16 sequences x 128 tokens = 2,048 tokens                          │
╰──────────────────────────────────────────────────────────────────────────────╯
"""
AFTER_FOUR = """\
 step         4/200  ━━━━━━━━━━━━━━━━━━━━━━━━━━   2%   0:06 elapsed, 0:39 left
 loss       2.0000 nats  █▆▃▁
 gradient   norm 1.234     lr 3.00e-03
 speed      12,345 tokens/s, 200 ms a step
 memory     pp0 312 MiB, pp1 298 MiB
"""
LABELS = ["step", "loss", "gradient", "speed", "memory"]


def step(number: int, **values) -> dict:
    return {
        "event": "step",
        "step": number,
        "loss": 6.0 - number,
        "grad_norm": 1.234,
        "lr": 3e-3,
        "tokens": 2469,
        "tokens_per_s": 12345.0,
        "step_s": 0.2,
        "mem_bytes": 312 << 20,
        "stage_mem_bytes": [312 << 20, 298 << 20],
        **values,
    }


class TerminalFile(io.StringIO):
    """A text file with the interface of a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Terminal:
    """A terminal emulator: newlines, wrapping, "up n lines", "erase below"."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = [""]
        self.row = 0

    def read(self, text: str) -> list[str]:
        """The rows of the screen after `text` was written."""
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|\n|[^\x1b\n]+", text):
            move_up = re.fullmatch(r"\x1b\[(\d+)F", part)
            if move_up:
                self.row -= int(move_up[1])
                assert self.row >= 0, "the cursor would leave the top"
            elif part == "\x1b[J":
                self.rows = [*self.rows[: self.row], ""]
            elif part == "\n":
                self._new_line()
            elif not part.startswith("\x1b"):
                self._type(part)
        return [row.rstrip() for row in self.rows]

    def _new_line(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def _type(self, text: str) -> None:
        line = self.rows[self.row] + text
        pieces = []
        for start in range(0, len(line), self.width):
            piece = line[start : start + self.width]
            pieces.append(piece)
        self.rows[self.row :] = pieces
        self.row += len(pieces) - 1


def live(width: int, height: int = 24, **options) -> tuple[LiveView, io.StringIO]:
    file = TerminalFile()
    console = Console(
        file=file, force_terminal=True, width=width, height=height, _environ={}, **options
    )
    return LiveView(console, now=iter(range(10**6)).__next__), file


def plain(every: int = 0) -> tuple[PlainView, io.StringIO]:
    file = io.StringIO()
    return PlainView(file, every=every, now=iter(range(10**6)).__next__), file


def numbers_of_lines(file: io.StringIO) -> list[int]:
    """The steps that have a line."""
    lines = file.getvalue().splitlines()
    return [int(line[4:].partition("/")[0]) for line in lines if line.startswith("step ")]


def show(view, *events) -> None:
    for event in events:
        view.handle(event)
    view.close()


def test_panel_at_80_columns():
    view, file = live(80)
    show(view, RUN, *(step(k) for k in range(1, 5)))
    assert "\n".join(Terminal(80).read(file.getvalue())) == HEADER + AFTER_FOUR


@pytest.mark.parametrize("width", [24, 40, 80, 120, 200])
def test_the_panel_fits_any_width_and_appears_once(width):
    view, file = live(width)
    note = {"event": "note", "text": "words that may be longer than a narrow terminal is wide"}
    show(
        view,
        RUN,
        step(1),
        note,
        *(step(k) for k in range(2, 201)),
        {"event": "end", "status": "finished", "seconds": 40.0},
    )
    rows = Terminal(width).read(file.getvalue())
    for row in rows:
        assert len(row) <= width
    assert sum(row.startswith(" step") for row in rows) == 1
    assert " ".join(rows).count("narrow") == 1
    assert "200/200" in " ".join(rows)


def test_the_panel_fits_a_terminal_of_few_rows():
    view, file = live(80, height=3)
    show(view, RUN, step(1), step(2))
    rows = Terminal(80).read(file.getvalue())
    actual = [row.split()[0] for row in rows[-3:-1]]
    assert actual == ["step", "loss"]


def test_a_redraw_after_the_window_became_narrower_leaves_nothing_behind():
    view, file = live(100)
    view.handle(
        step(1)
    )  # two of its five lines are longer than 24 columns, one of them than 4 x 24
    view._region.console.width = 24
    show(view, step(2))
    actual = [row.split()[0] for row in Terminal(24).read(file.getvalue())[:-1]]
    assert actual == LABELS


def test_the_cursor_is_never_hidden_and_stays_below_the_panel():
    view, file = live(80)
    show(view, RUN, step(1))
    assert "\x1b[?25l" not in file.getvalue()
    assert file.getvalue().endswith("\n")


def test_no_color_prints_no_colors():
    view, file = live(80, no_color=True)
    show(view, RUN, step(1))
    assert not re.search(r"\x1b\[(\d+;)*(3\d|4\d|9\d)(;\d+)*m", file.getvalue())


def test_an_ascii_terminal_gets_ascii():
    file = TerminalFile()
    file.encoding = "ascii"
    view = LiveView(Console(file=file, force_terminal=True, width=80, _environ={}))
    show(view, RUN, step(1), step(2))
    shown = file.getvalue()
    assert shown.isascii()
    rows = Terminal(80).read(shown)
    assert any(row.split()[:1] == ["loss"] for row in rows)


def test_the_panel_is_redrawn_at_most_once_a_frame():
    file = TerminalFile()
    view = LiveView(Console(file=file, force_terminal=True, width=80), now=lambda: 0.0)
    show(view, RUN, *(step(k) for k in range(1, 101)))
    assert file.getvalue().count("nats") == 1, "one frame, at the end"


def test_a_nan_loss_is_shown():
    view, file = live(80)
    show(view, RUN, step(1), step(2, loss=float("nan")), step(3, loss="NaN", grad_norm="Infinity"))
    loss_row = next(row for row in Terminal(80).read(file.getvalue()) if row.startswith(" loss"))
    assert loss_row == " loss       nan nats  ▁??"


def test_a_pipe_gets_plain_lines_and_a_terminal_the_panel(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert isinstance(open_view(io.StringIO()), PlainView)
    assert isinstance(open_view(TerminalFile()), LiveView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_view(TerminalFile()), PlainView)


def test_plain_lines_are_about_fifty_with_first_and_last():
    view, file = plain()
    show(view, {**RUN, "steps": 1234}, *(step(k) for k in range(1, 1235)))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step")]
    assert [line.split("/")[0] for line in (lines[0], lines[1], lines[-1])] == [
        "step    1",
        "step   50",
        "step 1234",
    ]
    assert len(lines) == 26
    assert lines[1] == (
        "step   50/1234  loss -44.0000 nats  grad norm 1.234  lr 3.00e-03  12,345 tokens/s  200 ms/step  "
        "memory pp0 312 MiB, pp1 298 MiB  0:50 elapsed  3:57 left"
    )


def test_plain_lines_of_every_nth_step_and_of_steps_that_something_follows():
    view, file = plain(every=4)
    saved = {"event": "save", "step": 6, "path": "x", "bytes": 1, "stall_s": 0, "write_s": 0}
    spike = {"event": "guard", "kind": "spike", "step": 10, "text": "guard: a spike"}
    show(
        view,
        {**RUN, "steps": 15},
        *(step(k) for k in range(1, 6)),
        {"event": "eval", "step": 5, "loss": 2.5},
        step(6),
        step(7),
        saved,  # it was written while step 7 was trained
        *(step(k) for k in range(8, 10)),
        spike,  # before the event of its step
        *(step(k) for k in range(10, 16)),
    )
    assert numbers_of_lines(file) == [1, 4, 5, 6, 8, 10, 12, 15]
    lines = file.getvalue().splitlines()
    place = lines.index(next(line for line in lines if line.startswith("evaluated after step 5")))
    assert lines[place - 1].startswith("step  5/15"), "the line of a step is above what follows it"


def test_a_step_that_is_trained_again_has_its_line_again():
    view, file = plain(every=1)
    back = {"event": "resume", "step": 1, "path": "x", "layout": "dp2"}
    show(view, RUN, step(1), step(2), back, step(2), step(3))
    assert numbers_of_lines(file) == [1, 2, 2, 3]


@pytest.mark.parametrize("make", [lambda: live(80), plain], ids=["live", "plain"])
def test_the_last_evaluation_stands_beside_the_loss(make):
    view, file = make()
    show(view, {**RUN, "steps": 2}, step(1), {"event": "eval", "step": 1, "loss": 4.25}, step(2))
    row = next(row for row in reversed(Terminal(200).read(file.getvalue())) if "4.0000" in row)
    assert "4.0000 nats" in row
    assert "evaluation 4.25" in row


def test_a_terminal_gets_lines_above_the_panel_where_their_number_is_named():
    file = TerminalFile()
    show(
        LiveView(Console(file=file, force_terminal=True, width=200), every=2),
        RUN,
        *map(step, range(1, 6)),
    )
    rows = Terminal(200).read(file.getvalue())
    assert [row[:12] for row in rows if row.startswith("step")] == [
        f"step   {k}/200" for k in (1, 2, 4)
    ]
    assert sum(row.startswith(" step") for row in rows) == 1


@pytest.mark.parametrize("make", [lambda: live(80), plain], ids=["live", "plain"])
def test_event_texts_are_printed_once_and_unclipped(make):
    view, file = make()
    why = "pp2: two stages\n  stage 0: embed"
    show(
        view,
        {**RUN, "why": why},
        step(1),
        {"event": "sample", "prompt": "def ", "text": "f():\n    pass"},
        step(2),
    )
    rows = Terminal(80).read(file.getvalue())
    words = [
        "pp2: two stages",
        "  stage 0: embed",
        "sample after the prompt 'def ':",
        "def f():",
        "    pass",
    ]
    assert [row for row in rows if row in words] == words


def test_the_plain_view_prints_the_last_step_of_a_run_that_stops_early():
    file = io.StringIO()
    show(PlainView(file), RUN, *(step(k) for k in range(1, 8)))
    assert file.getvalue().splitlines()[-1].startswith("step   7/200")


def test_the_plain_view_replaces_characters_that_the_encoding_lacks():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    show(PlainView(file), {"event": "note", "text": "1 × 2"})
    assert raw.getvalue() == b"1 ? 2\n"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ""),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "warning: no more output (No space left on device); the run continues\n",
        ),
        (
            OSError(errno.EIO, "I/O error"),
            "warning: no more output (I/O error); the run continues\n",
        ),
    ],
)
def test_an_output_that_cannot_be_written_does_not_end_the_run(capsys, error, shown):
    class Broken(TerminalFile):
        def write(self, text: str) -> int:
            if text:
                raise error
            return 0

    for view in (PlainView(Broken()), LiveView(Console(file=Broken(), force_terminal=True))):
        show(view, RUN, step(1), step(2))
        assert capsys.readouterr().err == shown, "said once"


def test_an_output_on_a_full_disk_does_not_fail_at_the_end_of_the_program():
    with open("/dev/full", "w", encoding="utf-8") as full:
        show(PlainView(full), RUN, step(1), step(2))
        full.flush()


def test_every_view_shows_tokens_and_time_of_the_same_recent_steps():
    """The last step alone was slow: neither view says so with one number and not with the other."""
    steps = [
        step(1, step_s=9.0),
        *(step(k, tokens=100) for k in range(2, 30)),
        step(30, tokens=100, step_s=2.2),
    ]
    expected = (f"{20 * 100 / 6.0:,.0f} tokens/s", "300 ms")
    view, file = plain()
    show(view, RUN, *steps)
    terminal = TerminalFile()
    show(LiveView(Console(file=terminal, force_terminal=True, width=80)), RUN, *steps)
    plain_line = file.getvalue().splitlines()[-1]
    live_line = next(row for row in Terminal(80).read(terminal.getvalue()) if "speed" in row)
    for shown in (plain_line, live_line):
        assert [text for text in expected if text in shown] == list(expected), shown


def test_the_time_left_excludes_the_first_step():
    progress = Progress()
    for event in (RUN, step(1, step_s=60.0), step(2), step(3)):
        progress.update(event)
    assert progress.left_s == pytest.approx(197 * 0.2)


def test_a_resumed_run_counts_from_its_start_step():
    progress = Progress()
    progress.update({**RUN, "start_step": 150})
    assert progress.num_done == 150
    progress.update(step(151))
    assert progress.num_done == 151
    assert progress.left_s == pytest.approx(49 * 0.2)


@pytest.mark.parametrize(
    ("formatted", "text"),
    [
        (count(0), "0"),
        (count(99_999), "99,999"),
        (count(100_000), "100 k"),
        (count(999_600), "1 M"),
        (count(10_612_480), "10.6 M"),
        (count(405e9), "405 B"),
        (memory(512), "512 B"),
        (memory(312 << 20), "312 MiB"),
        (memory(5 << 28), "1.25 GiB"),
        (memory(78 << 30), "78 GiB"),
        (short_time(8.2e-4), "820 us"),
        (short_time(0.1664), "166 ms"),
        (short_time(0.9999), "1 s"),
        (short_time(23.14), "23.1 s"),
        (clock(41.6), "0:42"),
        (clock(3723), "1:02:03"),
        (clock(3 * 86400 + 4 * 3600 + 300), "3d 04:05"),
        (clock(float("nan")), "-"),
    ],
)
def test_quantities_have_units(formatted, text):
    assert formatted == text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "step", "step": 3}, ""),
        ({"event": "note", "text": "2 ranks share 1 core"}, "2 ranks share 1 core"),
        (
            {"event": "eval", "step": 4, "loss": 2.0, "perplexity": 7.389, "tokens": 4096},
            "evaluated after step 4: loss 2.0000 nats, perplexity 7.39, 4,096 tokens",
        ),
        (
            {
                "event": "save",
                "step": 8,
                "path": "ckpt/step-000008",
                "bytes": 2 << 20,
                "stall_s": 4e-3,
                "write_s": 1.5,
            },
            "saved step 8: ckpt/step-000008, 2 MiB, training stalled 4 ms, written in 1.5 s",
        ),
        (
            {
                "event": "resume",
                "step": 2,
                "path": "ckpt/step-000002",
                "layout": "dp3",
                "passed_over": ["a: torn"],
            },
            "skipped: a: torn\nresumed after step 2: ckpt/step-000002, written by dp3",
        ),
        (
            {"event": "resume", "step": 0, "path": None},
            "no checkpoint in the run folder yet: training starts at step 1",
        ),
    ],
)
def test_event_texts(event, text):
    assert event_text(event) == text


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        ({"tokens": 90, "pairs": 4, "samples": 3}, "pairs"),
        ({"tokens": 90, "conversations": 4, "samples": 3}, "tokens"),
        ({"samples": 3}, "images"),
    ],
)
def test_steps_and_evaluations_name_what_they_count(data, unit):
    shown = io.StringIO()
    view = PlainView(shown)
    view.handle({**RUN, "data": data})
    view.handle(step(1))
    view.handle({"event": "eval", "step": 1, "loss": 0.5, "tokens": 7})
    assert f"12,345 {unit}/s" in shown.getvalue()
    assert f"evaluated after step 1: loss 0.5000 nats, 7 {unit}\n" in shown.getvalue()


@given(st.lists(st.floats(-1e300, 1e300)), st.integers(0, 100))
def test_a_sparkline_has_one_column_a_value_up_to_its_width(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_sparkline_is_highest_at_the_largest_value(values):
    drawn = sparkline(values, 50)
    assert drawn[values.index(max(values))] == max(drawn)


@given(st.floats(0.001, 1e9))
def test_the_step_distance_of_plain_lines_is_a_round_number(steps):
    nice = round_up(steps)
    assert steps <= nice < max(10 * steps, 2)
    assert str(nice).rstrip("0") in ("1", "2", "5")


def test_a_step_on_images_counts_images_instead_of_tokens():
    run = {"batch_size": 16, "seq_len": 128}
    images = {"source": "digits", "bytes": 9, "samples": 1797}
    tokens = {"source": "a.txt", "bytes": 9, "tokens": 9, "samples": 2}
    assert run_summary({**run, "data": images})[-1] == ("a step", "16 images")
    text = "16 sequences x 128 tokens = 2,048 tokens"
    assert run_summary({**run, "data": tokens})[-1] == ("a step", text)
