"""What the runs of a sweep have reached: a table, the best first, and one page over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from weft.checkpoint.disk import replace_file
from weft.commands.report_page import MAX_RUNS
from weft.commands.status import DONE
from weft.config.grid import GridPoint
from weft.errors import printable
from weft.start.report_at_end import EVENTS, FILE

if TYPE_CHECKING:
    from weft.report.recorded_values import RunRecord


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep, with what it has recorded.

    Attributes:
        record: None: it has recorded nothing.
        state: as `weft status` says it.
    """

    point: GridPoint
    folder: Path
    state: str
    record: RunRecord | None

    @property
    def evaluation(self) -> float:
        """Loss of the last evaluation; NaN without one."""
        evaluations = self.record.evaluations if self.record is not None else ()
        return evaluations[-1][1] if evaluations else math.nan

    @property
    def loss(self) -> float:
        """Training loss of the last step; NaN without one."""
        has_steps = self.record is not None and len(self.record.steps) > 0
        return float(self.record.columns["loss"][-1]) if self.record and has_steps else math.nan

    @property
    def num_steps(self) -> int:
        """Steps that are done."""
        has_steps = self.record is not None and len(self.record.steps) > 0
        return int(self.record.steps[-1]) if self.record and has_steps else 0

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Finished runs first, those with the least loss of the last evaluation, else of training."""
        value = self.loss if math.isnan(self.evaluation) else self.evaluation
        return self.state != DONE, not math.isfinite(value), value if math.isfinite(value) else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields of the table, and the folder."""
        return {
            "name": self.point.name,
            "folder": str(self.folder),
            "values": dict(self.point.values),
            "state": self.state,
            "steps": self.num_steps,
            "evaluation_loss": self.evaluation,
            "loss": self.loss,
            "speed": self.record.typical_speed if self.record is not None else math.nan,
        }


def results_table(found: Sequence[SweptRun], short_names: Mapping[str, str]) -> Table:
    """A row for each run, in their order; a column for each key with several values."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in short_names.values():
        table.add_column(printable(name), overflow="fold")
    table.add_column("state")
    for name in ("step", "evaluation", "loss", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found:
        values = [run.point.values[key] for key in short_names]
        table.add_row(*map(printable, (*values, run.state, *_figures(run))))
    return table


def _figures(run: SweptRun) -> tuple[str, ...]:
    speed = run.record.typical_speed if run.record is not None else math.nan
    unit = run.record.unit if run.record is not None else ""
    return (
        str(run.num_steps),
        f"{run.evaluation:.4f}" if math.isfinite(run.evaluation) else "-",
        "-" if not run.num_steps else f"{run.loss:.4f}",
        f"{speed:,.0f} {unit}/s" if math.isfinite(speed) else "-",
    )


def write_page(found: Sequence[SweptRun], folder: Path) -> Path | None:
    """The page over all runs that have recorded something: curves of the best, figures of all; None
    where there is none.
    """
    from weft.report.page import report_page  # late: they import numpy and jinja2

    records = [run.record for run in found if run.record is not None]
    if not records:
        return None
    path = folder / FILE
    replace_file(path, report_page(records[:MAX_RUNS], records[MAX_RUNS:]))
    return path


def recorded(point: GridPoint, folder: Path, state: str) -> SweptRun:
    """A run of a sweep with what its folder records.

    Raises:
        UserError: its events are damaged.
    """
    from weft.report.recorded_values import RunRecord  # late: it imports numpy

    has_events = (folder / EVENTS).is_file()
    record = RunRecord.read(folder, state=state) if has_events else None
    return SweptRun(point, folder, state, record)
