"""`weft compare`: two or more runs side by side: keys that differ, loss curves, where losses part, final figures. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich.table import Table

from weft.commands.console import (
    check_files,
    print_json,
    print_result,
    print_table,
    show_help,
    wants_help,
)
from weft.commands.run_list import run_folder_of
from weft.commands.status import run_status
from weft.config.command_options import JsonOptions, read_options
from weft.config.run_files import different_keys
from weft.errors import EXIT_OK, Fault, UserError, printable
from weft.view.quantity import clock, count, sparkline

if TYPE_CHECKING:
    from weft.report.recorded_values import RunRecord

NAME = "weft compare"
USAGE = "RUN RUN [RUN ...] [--json]"
LINE = "compare runs: keys that differ, loss curves, final figures"
MAX_RUNS = 12
CURVE_COLUMNS = 40


class CompareOptions(JsonOptions):
    """What is compared."""

    tolerance: float = Field(
        1e-6,
        ge=0,
        description="losses part where they differ by more than this share of the first run's",
    )


@dataclass(frozen=True)
class ComparedRun:
    """What a run folder records.

    Attributes:
        config: dotted keys.
        unit: what it counts: tokens, pairs or images.
        losses: step -> loss.
        figures: name -> value, the same names for all runs; None where a run has none.
    """

    name: str
    config: Mapping[str, Any]
    unit: str
    losses: Mapping[int, float]
    figures: Mapping[str, float | str | None]

    @staticmethod
    def read(folder: Path) -> ComparedRun:
        """The run of a folder.

        Raises:
            UserError: its events are damaged.
        """
        from weft.report.recorded_values import RunRecord  # late: it imports numpy

        run = RunRecord.read(folder, state=run_status(folder, now_s=time.monotonic()).state)
        losses = dict(zip(run.steps.tolist(), run.columns["loss"].tolist(), strict=True))
        return ComparedRun(str(folder), run.config, run.unit, losses, _figures(run))


def _figures(run: RunRecord) -> dict[str, float | str | None]:
    """The final figures: `speed` is the median since the last start, in units a second, `trained on`
    a number of units, `seconds` are those of the last start.
    """
    losses, norms = run.columns["loss"].tolist(), run.columns["grad_norm"].tolist()
    evaluated = [loss for _, loss in run.evaluations]
    return {
        "state": run.state,
        "steps": int(run.steps[-1]) if losses else None,
        "loss": losses[-1] if losses else None,
        "least loss": min(losses, default=None),
        "best evaluation": min(evaluated, default=None),
        "grad norm": norms[-1] if losses else None,
        "speed": run.typical_speed if math.isfinite(run.typical_speed) else None,
        "trained on": int(run.trained_tokens[-1]) if losses else None,
        "seconds": run.end.get("seconds"),
        "restarts": sum(mark.kind == "restart" for mark in run.marks),
    }


@dataclass(frozen=True)
class Parting:
    """How the losses of a run go with those of the first one.

    Attributes:
        common: steps that both have.
        first: the first of them at which the losses differ; None: they never do.
        largest: largest difference, as a share of the first run's loss.
    """

    common: int
    first: int | None
    largest: float

    @staticmethod
    def of(first: ComparedRun, other: ComparedRun, *, tolerance: float) -> Parting:
        """Compare two runs, step by step."""
        common = sorted(set(first.losses) & set(other.losses))
        shares = {step: _share(first.losses[step], other.losses[step]) for step in common}
        parted = (step for step in common if shares[step] > tolerance)
        return Parting(len(common), next(parted, None), max(shares.values(), default=0.0))

    def __str__(self) -> str:
        if not self.common:
            return "no step in common"
        if self.first is None:
            return f"the same in {self.common} common steps (largest difference {self.largest:.1e})"
        return f"parts at step {self.first}; largest difference {100 * self.largest:.2g}%"


def _share(loss: float, other: float) -> float:
    """The difference as a share of the first; two losses that are not finite are the same."""
    if loss == other or (math.isnan(loss) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(loss) and math.isfinite(other)):
        return math.inf
    return abs(other - loss) / max(abs(loss), 1e-300)


def compare(words: Sequence[str]) -> int:
    """Print what differs between runs.

    Raises:
        UserError: fewer than two runs, or none in a folder.
    """
    if wants_help(words):
        return show_help(CompareOptions(), f"{NAME} {USAGE}", LINE)
    options, places = read_options(words, CompareOptions)
    check_files(options, "json")
    if not 2 <= len(places) <= MAX_RUNS:
        got = " ".join(places) or "nothing"
        need = f"2 to {MAX_RUNS} run folders"
        raise UserError(Fault(NAME, "takes several runs", got=got, need=need, fix="see weft runs"))
    found = [ComparedRun.read(run_folder_of(place, command=NAME)) for place in places]
    first, *others = found
    partings = [Parting.of(first, other, tolerance=options.tolerance) for other in others]
    if options.json is not None:
        return print_json(options.json, _fields(found, partings))
    print_table(_config_table(found))
    for line in _curve_lines(found, partings):
        print_result(printable(line))
    print_result("")
    print_table(_figure_table(found))
    return EXIT_OK


def _table(found: Sequence[ComparedRun], first_column: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first_column, no_wrap=True)
    for run in found:
        table.add_column(printable(run.name), overflow="fold")
    return table


def _config_table(found: Sequence[ComparedRun]) -> Table:
    keys = different_keys([dict(run.config) for run in found])
    table = _table(found, "key" if keys else "no key differs")
    for key in keys:
        values = (_value_text(run.config.get(key)) for run in found)
        table.add_row(key, *map(printable, values))
    return table


def _value_text(value: Any) -> str:
    return "-" if value in (None, "") else str(value)


def _curve_lines(found: Sequence[ComparedRun], partings: Sequence[Parting]) -> Iterator[str]:
    yield ""
    yield "loss"
    for number, run in enumerate(found):
        losses = list(run.losses.values())
        curve = sparkline(losses, CURVE_COLUMNS) if losses else "no steps"
        ends = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""
        yield f"  {curve:<{CURVE_COLUMNS}}  {ends}  {run.name}"
        if number:
            yield f"    {partings[number - 1]}"


def _figure_table(found: Sequence[ComparedRun]) -> Table:
    table = _table(found, "figure")
    for name in found[0].figures:
        values = [run.figures[name] for run in found]
        if any(value is not None for value in values):
            table.add_row(name, *(_figure_text(name, run) for run in found))
    return table


def _figure_text(name: str, run: ComparedRun) -> str:
    value = run.figures[name]
    if value is None or isinstance(value, str):
        return value or "-"
    if name == "seconds":
        return clock(value)
    if "loss" in name or name in ("best evaluation", "grad norm"):
        return f"{value:.4f}"
    unit = {"speed": f" {run.unit}/s", "trained on": f" {run.unit}"}.get(name, "")
    return f"{count(value)}{unit}"


def _fields(found: Sequence[ComparedRun], partings: Sequence[Parting]) -> dict[str, Any]:
    keys = different_keys([dict(run.config) for run in found])
    return {
        "different_keys": {key: [run.config.get(key) for run in found] for key in keys},
        "runs": [
            {
                "run": run.name,
                "unit": run.unit,
                **run.figures,
                "losses": {str(k): v for k, v in run.losses.items()},
            }
            for run in found
        ],
        "against_the_first": [
            {"common_steps": each.common, "parts_at": each.first, "largest_share": each.largest}
            for each in partings
        ],
    }
