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
from weft.small_files import UnreadableFile
from weft.train.event_lines import read_run_events, step_history
from weft.train.event_log import EVENTS
from weft.view.progress import Progress, event_text

Event = Mapping[str, Any]
Column = NDArray[np.float64]

COLUMNS = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_s",
    "step_s",
    "mfu",
    "mem_bytes",
    "expert_load",
)
"""Numbers of a step event; NaN where a step has none."""
MARKED = ("guard", "restart", "resume", "save", "save_failed", "note")
"""Kinds of events that are listed."""


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
    """One run.

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
        try:
            events = list(read_run_events(folder / EVENTS))
        except (ValueError, UnreadableFile) as error:
            what = "the events cannot be read"
            raise UserError(Fault(str(folder), f"{what}: {error}")) from None
        by_kind: dict[str, list[Event]] = {}
        for event in events:
            by_kind.setdefault(event["event"], []).append(event)
        steps = step_history(events)
        start = _last(by_kind, "run")
        end = events[-1] if events and events[-1]["event"] == "end" else {}
        return RunRecord(
            name=folder.name or str(folder),
            state=state or str(end.get("status", "no end recorded")),
            config=stored_config(folder),
            start=start,
            unit=Progress(run=start).unit,
            steps=np.array([step["step"] for step in steps], dtype=np.int64),
            columns={name: _column(steps, name) for name in COLUMNS},
            stage_bytes=_stages(steps),
            repeated=len(by_kind.get("step", ())) - len(steps),
            evaluations=tuple(_evaluations(by_kind.get("eval", ()))),
            marks=tuple(_marks(events, unit=Progress(run=start).unit)),
            proofs=tuple(_since_last(events, "run", of="proof")),
            samples=tuple(_samples(by_kind.get("sample", ()))),
            prediction=_last(by_kind, "prediction"),
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


def number(value: Any) -> float:
    """The value of a field as a number; NaN where it is none."""
    return float(value) if type(value) in (int, float) else math.nan


def _last(by_kind: Mapping[str, Sequence[Event]], kind: str) -> Event:
    found = by_kind.get(kind)
    return found[-1] if found else {}


def _since_last(events: Sequence[Event], start: str, *, of: str) -> Iterator[Event]:
    """The events of one kind behind the last one of another."""
    first = max((at for at, event in enumerate(events) if event["event"] == start), default=0)
    return (event for event in events[first:] if event["event"] == of)


def _column(steps: Sequence[Event], name: str) -> Column:
    return np.array([number(step.get(name)) for step in steps], dtype=np.float64)


def _stages(steps: Sequence[Event]) -> Column:
    """Memory by stage; of steps with fewer stages than the widest one, which a resume on another
    layout has, the others are NaN.
    """
    rows = [step.get("stage_mem_bytes") or () for step in steps]
    rows = [row if isinstance(row, list) else () for row in rows]
    table = np.full((len(rows), max(map(len, rows), default=0)), math.nan)
    for index, row in enumerate(rows):
        table[index, : len(row)] = [number(each) for each in row]
    return table


def _evaluations(events: Sequence[Event]) -> Iterator[tuple[int, float]]:
    """Step and loss, the newest of each step, in the order of steps."""
    newest = {event.get("step", 0): number(event.get("loss")) for event in events}
    yield from sorted(newest.items())


def _samples(events: Sequence[Event]) -> list[Event]:
    """The newest text of each step, in the order of steps; one without a step is of the end."""
    newest = {number(event.get("step", math.inf)): event for event in events}
    return [newest[step] for step in sorted(newest)]


def _marks(events: Sequence[Event], *, unit: str) -> Iterator[Mark]:
    done = 0
    for event in events:
        kind = event["event"]
        if kind in ("step", "resume", "restart"):
            done = event.get("step", done)
        is_skipped = kind == "step" and bool(event.get("skipped"))
        if kind not in MARKED and not is_skipped:
            continue
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
