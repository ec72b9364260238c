"""The charts of a report as data: which series of which runs, downsampled, with the marks along them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.core.dimension import pipeline_axis
from weft.report.downsample import Curve, downsampled
from weft.report.figures import measured_memory_text, mfu_text
from weft.report.recorded_values import Column, RunRecord
from weft.report.run_history import number
from weft.view.progress import loss_unit

POINTS_OF_PAGE = 24_000
"""Points of all curves together: about 400 kB of the page."""
LEAST_POINTS, MOST_POINTS = 200, 2000
"""Points of one curve."""
LEAST_POINTS_OF_BLOCK = 50
"""Points of the curve of a block: a model may have hundreds of blocks."""
MIB, GIB = 2.0**20, 2.0**30
REWARDS = "Mean reward of chosen answers minus that of rejected ones: beta times log-probabilities (docs/finetuning.md)."
KL = "How far the model is from its reference, as KTO estimates it."
LOAD = "Largest over mean load of an expert, in the worst block; 1 is balanced."


@dataclass(frozen=True)
class ChartSeries:
    """One curve of a chart.

    Attributes:
        run: number of its run.
        colour: number of its colour.
        style: "points" are not joined and not smoothed.
    """

    label: str
    run: int
    colour: int
    curve: Curve
    style: str = "line"


@dataclass(frozen=True)
class Chart:
    """One chart; x is the step.

    Attributes:
        key: of the chart in files.
        note: what a reader must know of it.
    """

    key: str
    title: str
    unit: str
    series: tuple[ChartSeries, ...]
    note: str = ""


@dataclass(frozen=True)
class Measure:
    """A chart that shows a column of every run.

    Attributes:
        factor: by which its values are multiplied.
    """

    column: str
    title: str
    unit: Callable[[RunRecord], str]
    factor: float = 1.0
    note: Callable[[RunRecord], str] = lambda run: ""


MEASURES = (
    Measure("loss", "Loss", lambda run: loss_unit(run.unit).strip()),
    Measure("grad_norm", "Gradient norm", lambda run: ""),
    Measure("lr", "Learning rate", lambda run: ""),
    Measure("tokens_per_s", "Speed", lambda run: f"{run.unit}/s"),
    Measure(
        "mfu",
        "Model FLOPs utilization",
        lambda run: "%",
        100.0,
        lambda run: f"MFU: {mfu_text(run)}.",
    ),
    Measure("rewards_margins", "Reward margin", lambda run: "", note=lambda run: REWARDS),
    Measure("rewards_chosen", "Reward of chosen answers", lambda run: ""),
    Measure("rewards_rejected", "Reward of rejected answers", lambda run: ""),
    Measure(
        "rewards_accuracies", "Pairs whose chosen answer has more reward", lambda run: "%", 100.0
    ),
    Measure("z0", "z0", lambda run: loss_unit(run.unit).strip(), note=lambda run: KL),
    Measure("expert_load", "Expert load", lambda run: "x", note=lambda run: LOAD),
)


BLOCK_MEASURES = {
    "grad_norm": "Gradient norm of a block",
    "param_rms": "RMS of the parameters of a block",
    "output_rms": "RMS of the outputs of a block",
}
"""Field of a `blocks` event -> the title of its chart."""


def charts(runs: Sequence[RunRecord]) -> tuple[Chart, ...]:
    """The charts that have values, in the order of the page."""
    num_curves = len(runs) * (len(MEASURES) + 1)
    most = min(MOST_POINTS, max(LEAST_POINTS, POINTS_OF_PAGE // num_curves))
    found = [_chart(measure, runs, most) for measure in MEASURES]
    found.insert(len(MEASURES) - 1, _memory(runs, most))
    found.extend(_of_blocks(field, title, runs, most) for field, title in BLOCK_MEASURES.items())
    return tuple(chart for chart in found if chart.series)


def _chart(measure: Measure, runs: Sequence[RunRecord], most: int) -> Chart:
    series = list(_series(measure, runs, most))
    notes = dict.fromkeys(measure.note(run) for run in runs)
    note = " ".join(note for note in notes if note) if series else ""
    return Chart(measure.column, measure.title, measure.unit(runs[0]), tuple(series), note)


def _series(measure: Measure, runs: Sequence[RunRecord], most: int) -> Iterator[ChartSeries]:
    for index, run in enumerate(runs):
        label = run.name if len(runs) > 1 else measure.title.lower()
        values = run.columns[measure.column] * measure.factor
        if np.isfinite(values).any():
            yield ChartSeries(label, index, index, downsampled(_steps(run), values, most=most))
        if measure.column == "loss" and run.evaluations:
            x, y = np.array(run.evaluations, dtype=np.float64).T
            label = f"{label}, evaluation" if len(runs) > 1 else "evaluation"
            colour = index if len(runs) > 1 else 1
            yield ChartSeries(label, index, colour, downsampled(x, y, most=most), "points")


def _memory(runs: Sequence[RunRecord], most: int) -> Chart:
    """Of one run every stage, of several the fullest stage of each."""
    most_bytes = max(float(np.nanmax(run.columns["mem_bytes"], initial=0.0)) for run in runs)
    unit_bytes, unit = (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")
    series = list(
        _stages(runs[0], most, unit_bytes) if len(runs) == 1 else _fullest(runs, most, unit_bytes)
    )
    note = "; ".join(dict.fromkeys(map(measured_memory_text, runs)))
    return Chart("memory", "Memory of a rank", unit, tuple(series), f"Measured: {note}.")


def _stages(run: RunRecord, most: int, unit_bytes: float) -> Iterator[ChartSeries]:
    steps = _steps(run)
    num_stages = run.stage_bytes.shape[1]
    for stage in range(num_stages):
        name = f"{pipeline_axis()}{stage}" if num_stages > 1 else "fullest rank"
        values = run.stage_bytes[:, stage] / unit_bytes
        yield ChartSeries(name, 0, stage, downsampled(steps, values, most=most))


def _fullest(runs: Sequence[RunRecord], most: int, unit_bytes: float) -> Iterator[ChartSeries]:
    for index, run in enumerate(runs):
        values = run.columns["mem_bytes"] / unit_bytes
        if np.isfinite(values).any():
            yield ChartSeries(run.name, index, index, downsampled(_steps(run), values, most=most))


def _of_blocks(field: str, title: str, runs: Sequence[RunRecord], most: int) -> Chart:
    """A curve for each block of a single run: those of several would be too many."""
    events = runs[0].blocks if len(runs) == 1 else ()
    rows = [(number(event.get("step")), _numbers(event.get(field))) for event in events]
    names = dict.fromkeys(name for _, row in rows for name in row)
    if names:
        share = POINTS_OF_PAGE // (len(BLOCK_MEASURES) * len(names))
        most = min(most, max(LEAST_POINTS_OF_BLOCK, share))
    x = np.array([step for step, _ in rows], dtype=np.float64)
    series = []
    for colour, name in enumerate(names):
        y = np.array([number(row.get(name)) for _, row in rows], dtype=np.float64)
        series.append(ChartSeries(name, 0, colour, downsampled(x, y, most=most)))
    return Chart(f"block_{field}", title, "", tuple(series))


def _numbers(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _steps(run: RunRecord) -> Column:
    return run.steps.astype(np.float64)
