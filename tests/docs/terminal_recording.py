"""The terminal recording of the pages: `LiveView` shows the events of a recorded run, then the proof of its first steps.

    PYTHONPATH=. python -m tests.docs.terminal_recording     trains, proves, and writes train.jsonl and prove.txt

`docs/pictures/train.jsonl` has the events of the run, `prove.txt` what `weft prove` has printed. The picture is drawn
from these two, so that it has the words of today's screens and the numbers of the run. The reasons of the layout, which
the screen has above the steps, are left out: 20 lines that `weft explain` prints, too.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.color import Color
from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from weft.view.live import LiveView
from weft.view.svg_elements import document_start, element, px, text_element

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
EVENTS, PROOF = FOLDER / "train.jsonl", FOLDER / "prove.txt"
TRAIN = 'weft train --mesh "pp2 dp2 tp2" --steps 40 --out runs/demo'
PROVE = "weft prove runs/demo --first 4"
SHOWN = re.compile(r"runs/|  step  |equal")
"""Beginnings of the lines of a proof that are shown."""
COLUMNS, ROWS = 100, 35
SPEED = 2.5
"""Seconds of the run in one of the picture."""
PAUSE_S, LINE_S = 0.8, 0.25
"""Before a command, and between two lines of the proof."""
STEPS_PER_FRAME = 4
CHARACTER_PX, LINE_PX, MARGIN_PX = 7.9, 18, 14
BACKGROUND, INK, PROMPT, GOOD = (32, 33, 36), (232, 234, 237), "bold #8ab4f8", "#81c995"
THEME = TerminalTheme(
    BACKGROUND,
    INK,
    [
        *(BACKGROUND, (242, 139, 130), (129, 201, 149), (253, 214, 99)),
        *((138, 180, 248), (197, 138, 249), (120, 217, 236), INK),
    ],
)
ERASE = re.compile(r"\x1b\[(\d+)F\x1b\[J")


class Screen(io.StringIO):
    """A terminal as LiveView uses it: lines, of which the last few may be erased."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Text] = []

    def write(self, text: str, /) -> int:
        """Erase what the text begins with, and add its lines."""
        erased = ERASE.match(text)
        if erased:
            del self.lines[-int(erased[1]) :]
        self.lines += [
            Text.from_ansi(line) for line in text[erased.end() if erased else 0 :].splitlines()
        ]
        return len(text)


Frame = tuple[float, tuple[Text, ...]]
"""From when on the screen shows these lines, seconds."""


def frames() -> Iterator[Frame]:
    """The screen after each change."""
    events = [json.loads(line) for line in EVENTS.read_text(encoding="utf-8").splitlines()]
    screen = Screen()
    screen.lines.append(Text.assemble((f"$ {TRAIN}", PROMPT)))
    yield 0.0, tuple(screen.lines)
    clock_s, start_s = 0.0, 0.0
    console = Console(
        file=screen, width=COLUMNS, height=ROWS, force_terminal=True, color_system="truecolor"
    )
    view = LiveView(console, now=lambda: clock_s)
    for event, at_s in zip(events, _times(events), strict=True):
        clock_s = at_s
        start_s = start_s or PAUSE_S - at_s / SPEED
        view.handle({name: value for name, value in event.items() if name != "why"})
        if event["event"] != "step" or event["step"] % STEPS_PER_FRAME == 0:
            yield start_s + clock_s / SPEED, tuple(screen.lines)
    at_s = start_s + clock_s / SPEED + PAUSE_S
    lines = [Text.assemble((f"$ {PROVE}", PROMPT))]
    lines += [
        Text.assemble((line, GOOD if line.startswith("equal") else ""))
        for line in PROOF.read_text(encoding="utf-8").splitlines()
        if SHOWN.match(line)
    ]
    for line in lines:
        screen.lines.append(line)
        yield at_s, tuple(screen.lines)
        at_s += LINE_S


def _times(events: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds from the start of the run to each event: its end and the steps state theirs."""
    left_s = [event["step_s"] if event["event"] == "step" else 0.0 for event in events]
    end_s = float(events[-1]["seconds"])
    return [end_s - sum(left_s[number + 1 :]) for number in range(len(events))]


def recording() -> str:
    """The document; without animation, in a still picture, the last screen is shown."""
    shown = list(frames())
    width = round(COLUMNS * CHARACTER_PX) + 2 * MARGIN_PX
    height = ROWS * LINE_PX + 2 * MARGIN_PX
    background = "#{:02x}{:02x}{:02x}".format(*BACKGROUND)
    parts = [
        document_start(width, height, font_family="monospace", font_size=13),
        element("rect", width=width, height=height, rx=6, fill=background),
    ]
    end_s = shown[-1][0]
    for row in range(ROWS):
        states = ((at_s, lines[row] if row < len(lines) else None) for at_s, lines in shown)
        runs = [
            (line, next(group)[0]) for line, group in groupby(states, key=lambda state: state[1])
        ]
        ends = [at_s for _, at_s in runs[1:]]
        for (line, from_s), to_s in zip(runs, [*ends, None], strict=True):
            if line is not None and line.plain.strip():
                parts.append(_line(line, row=row, from_s=from_s, to_s=to_s, end_s=end_s))
    return "\n".join([*parts, "</svg>", ""])


def _line(line: Text, *, row: int, from_s: float, to_s: float | None, end_s: float) -> str:
    """A line of the screen while it is there; one that stays is there in a still picture, too."""
    y = MARGIN_PX + (row + 1) * LINE_PX - 5
    column, texts = 0, ""
    for segment in line.render(Console(color_system="truecolor"), end=""):
        texts += _segment(segment, x=MARGIN_PX + column * CHARACTER_PX, y=y)
        column += segment.cell_length
    moments = {0.0: 0, from_s / end_s: 1}
    if to_s is not None:
        moments[to_s / end_s] = 0
    if len(moments) == 1:
        return element("g", texts)
    appears = element(
        "animate",
        attributeName="opacity",
        values=";".join(map(str, moments.values())),
        keyTimes=";".join(f"{moment:.4g}" for moment in moments),
        calcMode="discrete",
        dur=f"{end_s:.1f}s",
    )
    return element("g", texts + appears, opacity=int(to_s is None))


def _segment(segment: Segment, *, x: float, y: int) -> str:
    text = segment.text
    if not text.strip():
        return ""
    style = segment.style
    colour = style.color if style and style.color else Color.default()
    attributes: dict[str, str | int | float] = {"fill": colour.get_truecolor(THEME).hex}
    if style and style.bold:
        attributes["font_weight"] = "bold"
    if style and style.dim:
        attributes["fill_opacity"] = 0.65
    start = len(text) - len(text.lstrip())
    text = text.strip()
    return text_element(
        text,
        x=px(x + start * CHARACTER_PX),
        y=y,
        textLength=px(len(text) * CHARACTER_PX),
        **{"xml:space": "preserve"},
        **attributes,
    )


def record() -> None:
    """Train and prove in a new folder, and keep the events and the output."""
    with tempfile.TemporaryDirectory() as folder:
        proof = ""
        for command in (TRAIN, PROVE):
            words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)[1:]]
            done = subprocess.run(
                [sys.executable, "-m", "weft", *words],
                cwd=folder,
                capture_output=True,
                text=True,
                check=True,
            )
            proof = done.stdout
        events = Path(folder, "runs", "demo", "events.jsonl").read_text(encoding="utf-8")
    EVENTS.write_text(events, encoding="utf-8")
    PROOF.write_text(proof, encoding="utf-8")


if __name__ == "__main__":
    record()
