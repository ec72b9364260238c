"""The terminal recording in README: lines of a recorded session, which appear one after the other.

    PYTHONPATH=. python -m tests.docs.terminal_recording     writes docs/pictures/train.svg from train.txt

`train.txt` has one shown line a line: seconds after the one before, a tab, the text.
"""

from __future__ import annotations

from pathlib import Path

from weft.view.svg_elements import document_start, element, text_element

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
COLUMNS = 100
CHARACTER_PX, LINE_PX, MARGIN_PX = 7.9, 18, 14
COLOURS = {"$ ": "#8ab4f8", "proved": "#81c995", "equal": "#81c995"}
"""Beginning of a line -> its colour."""


def recording() -> str:
    """The document; without animation, in a still picture, all lines are shown."""
    lines = (FOLDER / "train.txt").read_text(encoding="utf-8").splitlines()
    width = round(COLUMNS * CHARACTER_PX) + 2 * MARGIN_PX
    height = len(lines) * LINE_PX + 2 * MARGIN_PX
    parts = [
        document_start(width, height, font_family="monospace", font_size=13),
        element("rect", width=width, height=height, rx=6, fill="#202124"),
    ]
    at_s = 0.0
    for number, line in enumerate(lines):
        pause, _, text = line.partition("\t")
        at_s += float(pause)
        fill = next((COLOURS[each] for each in COLOURS if text.startswith(each)), "#e8eaed")
        y = MARGIN_PX + (number + 1) * LINE_PX - 5
        shown = text_element(text[:COLUMNS], x=MARGIN_PX, y=y, fill=fill, xml__space="preserve")
        appears = element(
            "animate",
            attributeName="opacity",
            values="0;1",
            keyTimes="0;0.999",
            calcMode="discrete",
            dur=f"{at_s or 0.1:.1f}s",
        )
        parts.append(element("g", shown.replace("xml--space", "xml:space") + appears))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (FOLDER / "train.svg").write_text(recording(), encoding="utf-8")
