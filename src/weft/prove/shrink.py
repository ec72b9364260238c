"""The smallest case of a run that fails its proof: fewer steps, ranks, options, layers and sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.config.run import Run
from weft.core.mesh import Mesh
from weft.errors import UserError
from weft.prove.proof import Subject, prove
from weft.prove.reduce import command_of, is_valid, reduced, with_mesh
from weft.prove.report import ProofReport

MAX_SECONDS = 60.0
DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("parallel.zero", 0),
    ("parallel.recompute", "none"),
    ("parallel.sequence", False),
    ("parallel.context", "ring"),
    ("pipeline.schedule", "1f1b"),
    ("lora.rank", 0),
    ("data.packing", "stream"),
    ("optim.clip", 0.0),
    ("precision.params", "float32"),
    ("precision.reduce", "float32"),
    ("precision.compute", "float32"),
)
"""Options that a smaller case may do without."""


def smallest_case(
    run: Run,
    report: ProofReport,
    *,
    seconds: float = MAX_SECONDS,
) -> ProofReport:
    """The report of the smallest case that still fails, found greedily within some time."""
    search = _Search(run, report, time.monotonic() + seconds)
    search.run_all()
    command = command_of(search.run, steps=search.report.steps)
    return replace(search.report, command=command)


class _Search:
    """A failing case, made smaller step by step."""

    def __init__(
        self,
        run: Run,
        report: ProofReport,
        deadline_s: float,
    ) -> None:
        self.run = run
        self.report = report
        self.deadline_s = deadline_s

    def run_all(self) -> None:
        """Try everything once; each change that still fails is kept."""
        first = self.report.first
        wanted = 1 if first is None else first.step
        for steps in sorted({1, wanted, wanted + 1}):
            if steps < self.report.steps and self._keeps_failing(self.run, steps):
                break
        for axis, degree in self.run.device_mesh.axes:
            for smaller in sorted({1, 2}):
                if smaller < degree and self._try_mesh(axis, smaller):
                    break
        for key, value in DEFAULTS:
            self._try_value(key, value)
        for run in self._sizes():
            self._keeps_failing(run, self.report.steps)

    def _try_mesh(self, axis: str, degree: int) -> bool:
        mesh = without_axis(self.run.device_mesh, axis, degree)
        return self._keeps_failing(with_mesh(self.run, mesh), self.report.steps)

    def _try_value(self, key: str, value: Any) -> None:
        section, _, name = key.partition(".")
        if getattr(getattr(self.run, section), name) == value:
            return
        values = {key: value}
        if key == "pipeline.schedule":
            values["pipeline.chunks"] = 1
            values["pipeline.table"] = ()
        self._keeps_failing(self.run.with_values(values), self.report.steps)

    def _sizes(self) -> Iterator[Run]:
        """Smaller sizes of the run as it is then."""
        for layers in (1, 2, 3, 4):
            if layers < self.run.model.architecture.get("layers", 0):
                yield self.run.with_values({"model.layers": layers})
        yield reduced(self.run)
        data_ranks = self.run.num_data_ranks
        for num_micro in (1, 2):
            if num_micro < self.run.num_micro:
                size = self.run.batch.micro_size * num_micro * data_ranks
                yield self.run.with_values({"batch.global_size": size})
        if self.run.batch.micro_size > 1:
            size = self.run.num_micro * data_ranks
            yield self.run.with_values({"batch.micro_size": 1, "batch.global_size": size})

    def _keeps_failing(self, run: Run, steps: int) -> bool:
        """Whether a smaller case fails too; then it replaces the case."""
        is_same = run == self.run and steps == self.report.steps
        if is_same or time.monotonic() > self.deadline_s or not is_valid(run):
            return False
        try:
            report = prove(Subject.of(run, steps=steps))
        except UserError:
            return False
        if report.holds:
            return False
        self.run = run
        self.report = report
        return True


def without_axis(
    mesh: Mesh,
    axis: str,
    degree: int,
) -> str:
    """The text of a mesh with another degree of an axis; 1 leaves it out."""
    words = []
    for name, old in mesh.axes:
        new = degree if name == axis else old
        if new > 1:
            words.append(f"{name}{new}")
    return " ".join(words)
