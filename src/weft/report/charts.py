"""The charts of a report as data: which series of which runs, downsampled, with the marks along them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.core.dimension import pipeline_axis
from weft.errors import counted
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
DIFFERENCE = "Difference from one device"
SHARE = "A share of the loss; bound: what rounding explains."
"""Of the difference from one device."""
LOAD = "Largest over mean load of an expert, in the worst block; 1 is balanced."


@dataclass(frozen=True)
class ChartSeries:
    """One curve of a chart.

    Attributes:
        run: number of its run.
        colour: number of its colour.
        style: "points" are not joined and not smoothed, "dashes" show what lies below them.
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
        is_log: whether the y axis is always logarithmic; all values are above 0.
    """

    key: str
    title: str
    unit: str
    series: tuple[ChartSeries, ...]
    note: str = ""
    is_log: bool = False


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
    found[1:1] = one_device_charts(runs, most)
    found.extend(_of_blocks(field, title, runs, most) for field, title in BLOCK_MEASURES.items())
    return tuple(chart for chart in found if chart.series)


def one_device_charts(runs: Sequence[RunRecord], most: int = MOST_POINTS) -> tuple[Chart, ...]:
    """The losses that were compared with one device: those of a single run over those of one device,
    and how far each run is apart; without series where no loss was compared.
    """
    beside: list[ChartSeries] = []
    apart: list[ChartSeries] = []
    for index, run in enumerate(runs):
        recorded, alone, bound, relative = _compared_losses(run, most)
        if len(runs) > 1:
            apart.append(ChartSeries(run.name, index, index, relative))
            continue
        beside.append(ChartSeries("layout", index, 0, recorded))
        beside.append(ChartSeries("one device", index, 1, alone, "dashes"))
        apart.append(ChartSeries("difference", index, 2, relative))
        apart.append(ChartSeries("bound", index, 7, bound, "dashes"))
    num_equal = sum(each.relative == 0 for run in runs for each in run.losses)
    note = SHARE
    if num_equal:
        note = f"{SHARE} Equal in every digit, so not drawn: {counted(num_equal, 'step')}."
    unit = loss_unit(runs[0].unit).strip()
    return (
        Chart("one_device", "Loss beside one device", unit, _drawn(beside)),
        Chart("difference", DIFFERENCE, "", _drawn(apart), note, is_log=True),
    )


def _compared_losses(run: RunRecord, most: int) -> Iterator[Curve]:
    """Losses of the run and of one device, bounds, and differences above 0."""
    steps = np.array([each.step for each in run.losses], dtype=np.float64)
    for field in ("recorded", "alone", "bound", "relative"):
        values = np.array([getattr(each, field) for each in run.losses], dtype=np.float64)
        if field in ("bound", "relative"):
            values[values <= 0] = np.nan
        yield downsampled(steps, values, most=most)


def _drawn(series: Sequence[ChartSeries]) -> tuple[ChartSeries, ...]:
    return tuple(each for each in series if each.curve.total)


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
