"""What a run folder records, as one value: columns of steps, evaluations, marks, texts, the proof. Nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.run_files import stored_config
from weft.errors import Fault, UserError
from weft.prove.losses import StepLosses, kept_losses
from weft.report.run_history import Event, RunHistory, number
from weft.small_files import UnreadableFile
from weft.train.event_lines import read_run_events
from weft.train.event_log import EVENTS
from weft.view.progress import Progress, event_text

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Mark:
    """An event of a run that is no step.

    Attributes:
        step: number of steps done when it happened.
        kind: of the event; of a guard its own kind.
    """

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class RunRecord:
    """The values of one run that its report shows.

    Attributes:
        state: how it ended, or that it has not.
        config: dotted keys.
        start: its last `run` event.
        unit: what it counts: tokens, pairs or images.
        steps: number of each step, without those that a resume went back behind.
        columns: by the names of `COLUMNS`.
        stage_bytes: measured memory, a row for each step and a column for each stage.
        repeated: steps that a resume or restart went back behind.
        proofs: verdicts of the last start: those before it may be of other layouts.
        samples: texts, the newest of each step.
        blocks: numbers of the blocks, the newest of each step.
        losses: of steps that were compared with one device, beside its own.
        prediction, end: events; empty where there is none.
    """

    name: str
    state: str
    config: Mapping[str, Any]
    start: Event
    unit: str
    steps: NDArray[np.int64]
    columns: Mapping[str, Column]
    stage_bytes: Column
    repeated: int
    evaluations: tuple[tuple[int, float], ...]
    marks: tuple[Mark, ...]
    proofs: tuple[Event, ...]
    samples: tuple[Event, ...]
    blocks: tuple[Event, ...]
    losses: tuple[StepLosses, ...]
    prediction: Event
    end: Event

    @staticmethod
    def read(folder: Path, *, state: str = "") -> RunRecord:
        """The run of a folder.

        Args:
            state: where it is known better than from the events, such as "running".

        Raises:
            UserError: its events are damaged, or cannot be read.
        """
        history = RunHistory()
        try:
            for event in read_run_events(folder / EVENTS):
                history.add(event)
        except (ValueError, UnreadableFile) as error:
            what = "the events cannot be read"
            raise UserError(Fault(str(folder), f"{what}: {error}")) from None
        return RunRecord.of(history, folder, state=state)

    @staticmethod
    def of(history: RunHistory, folder: Path, *, state: str = "") -> RunRecord:
        """The run of a folder whose events have been read; a copy, which later events do not change."""
        unit = Progress(run=history.start).unit
        last = history.last
        end = last if last.get("event") == "end" else {}
        return RunRecord(
            name=folder.name or str(folder),
            state=state or str(end.get("status", "no end recorded")),
            config=stored_config(folder),
            start=history.start,
            unit=unit,
            steps=np.array(history.steps, dtype=np.int64),
            columns={
                name: np.array(column, dtype=np.float64) for name, column in history.columns.items()
            },
            stage_bytes=_table(history.stages, num_rows=len(history.steps)),
            repeated=history.num_trained - len(history.steps),
            evaluations=tuple(sorted(history.evaluations.items())),
            marks=tuple(_marks(history.marked, unit=unit)),
            proofs=tuple(history.proofs),
            samples=tuple(history.samples[step] for step in sorted(history.samples)),
            blocks=tuple(history.blocks[step] for step in sorted(history.blocks)),
            losses=kept_losses(
                folder, dict(zip(history.steps, history.columns["loss"], strict=True))
            ),
            prediction=history.prediction,
            end=end,
        )

    @property
    def last_start(self) -> slice:
        """The steps since the last start, which may have another layout than those before."""
        first = int(np.searchsorted(self.steps, number(self.start.get("start_step", 0)), "right"))
        return slice(first, None)

    @property
    def trained_tokens(self) -> Column:
        """Tokens after each step, from the first one that is recorded."""
        return np.cumsum(np.nan_to_num(self.columns["tokens"]))

    @property
    def hours(self) -> Column:
        """Time of training after each step: the sum of the steps' times."""
        return np.cumsum(np.nan_to_num(self.columns["step_s"])) / 3600

    @property
    def typical_speed(self) -> float:
        """Median speed of the last start after its first step, in units a second; NaN without one."""
        return self.typical("tokens_per_s")

    def typical(self, column: str) -> float:
        """Median of a column over the last start, without its first step, which warms caches; NaN
        where there is no other.
        """
        return median(self.columns[column][self.last_start][1:])


def median(values: Column) -> float:
    """Of those that are finite; NaN where none is."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _table(columns: Sequence[Sequence[float]], *, num_rows: int) -> Column:
    """Columns side by side; of steps with fewer stages than the widest one, which a resume on another
    layout has, the others are NaN.
    """
    table = np.empty((num_rows, len(columns)))
    for index, column in enumerate(columns):
        table[:, index] = column
    return table


def _marks(events: Sequence[tuple[int, Event]], *, unit: str) -> Iterator[Mark]:
    for done, event in events:
        kind = event["event"]
        is_skipped = kind == "step"
        shown_kind = str(event.get("kind", "guard")) if kind == "guard" else kind
        if is_skipped:
            shown_kind = "skipped"
        text = _text_of(event, unit)
        if text or is_skipped:
            yield Mark(event.get("step", done), shown_kind, text or "the update was left out")


def _text_of(event: Event, unit: str) -> str:
    """The text that the run has shown; of an event without the fields that it needs, all it has."""
    try:
        return event_text(event, unit=unit)
    except (KeyError, TypeError, ValueError):
        return str(dict(event))
