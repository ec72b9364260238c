"""Tables and pictures of docs/results.md, drawn from the figures in docs/results/*.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.report.charts import Chart, ChartSeries
from weft.report.downsample import Curve
from weft.report.svg_charts import picture

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "results.md"
FOLDER = DOCS / "results"
PICTURES = DOCS / "pictures"
TABLE = re.compile(r"(<!-- table of (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADINGS = (
    *("run", "steps", "last loss", "evaluation, best", "evaluation, last"),
    *("largest difference of a step's loss", "first step"),
)


def differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """The difference of each step's loss from that of another run, as a share of it."""
    pairs = zip(losses, reference, strict=True)
    return [abs(loss - other) / abs(other) for loss, other in pairs]


def read(name: str) -> dict[str, Any]:
    """The figures of a result."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def names() -> list[str]:
    """The results that are kept."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def table(result: dict[str, Any]) -> str:
    """The runs of a result as a Markdown table."""
    has_accuracy = result["runs"][0]["accuracy"] is not None
    headings = (*HEADINGS, "accuracy") if has_accuracy else HEADINGS
    rows = [headings, ["---"] * len(headings), *(list(_cells(run)) for run in result["runs"])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(run: dict[str, Any]) -> Iterator[str]:
    evaluated = [loss for _, loss in run["evaluations"]]
    is_reference = run["compared_with"] == run["label"]
    ranks = f" ({run['ranks']} ranks)" if run["ranks"] > 1 else ""
    yield f"{run['label']}{ranks}"
    yield f"{run['steps']:,}"
    yield f"{run['last_loss']:.6f}"
    yield f"{min(evaluated):.6f}"
    yield f"{evaluated[-1]:.6f}"
    yield "" if is_reference else _difference(run)
    yield f"proved {' and '.join(dict.fromkeys(run['proof']))}" if run["ranks"] > 1 else ""

    if run["accuracy"] is not None:
        yield f"{run['accuracy']:.1%}"


def _difference(run: dict[str, Any]) -> str:
    if not run["largest_difference"]:
        return f"0, bit for bit `{run['compared_with']}`"
    return f"{run['largest_difference']:.1e} of `{run['compared_with']}`"


def result_picture(result: dict[str, Any]) -> str:
    """The losses of all runs with their evaluations, and how far each is from its reference."""
    curves, spread = [], []
    for index, run in enumerate(result["runs"]):
        curves.append(_series(run["label"], index, *run["curve"]))
        evaluated = list(zip(*run["evaluations"], strict=True))
        curves.append(_series(run["label"], index, *evaluated, style="points"))
        x, y = run["difference_curve"]
        points = [(step, value) for step, value in zip(x, y, strict=True) if value > 0]
        if points:
            spread.append(_series(run["label"], index, *zip(*points, strict=True)))
    charts = [
        Chart("loss", "Loss", "nats", tuple(curves)),
        Chart(
            "difference",
            "Difference of the loss from one device",
            "a share of the loss",
            tuple(spread),
            is_log=True,
        ),
    ]
    return picture(charts, names=[run["label"] for run in result["runs"]])


def _series(
    label: str, index: int, x: Sequence[float], y: Sequence[float], style: str = "line"
) -> ChartSeries:
    xs, ys = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
    return ChartSeries(label, index, index, Curve(xs, ys, xs, ys, len(xs)), style)


def page_with_tables(page: str) -> str:
    """The page with its tables drawn anew."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(read(found[2]))}\n\n", page)


def write_page() -> None:
    """Draw the tables and the pictures."""
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name in names():
        path = PICTURES / f"results-{name}.svg"
        path.write_text(result_picture(read(name)), encoding="utf-8")
