"""The typed certificate of a run: the types of a step of every role of ranks, and the line that `weft explain` prints.

Note [Roles of a certificate]
    Pipeline coordinates with equal blocks and actions are typed once. There the rank at the first
    place along every axis is typed, and the one at the last place along all of them, for code that
    asks for the place asks whether it is the first: which copy of a loss or of a gradient counts.
    A gradient is stored by one micro-batch, added to by the others and reduced with the last, so
    the first and the last one stand for all; at the last place the last one alone.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weft.core.dimension import pipeline_axis
from weft.errors import counted
from weft.planner.certificate.type_mode import KnownCalls, TypeFinding
from weft.planner.certificate.typed_step import TypedStep, typed_axes, typed_step
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import row_signature

Verdict = Literal["agrees", "mismatch", "unknown"]
WIDTH = 80
MOST_SHOWN = 5
"""Findings that are printed."""


@dataclass(frozen=True)
class Certificate:
    """What the types of a run's step say, for all of its ranks.

    Attributes:
        num_ranks: of the run.
        axes: that were typed.
        steps: of the ranks that stand for all.
    """

    num_ranks: int
    axes: tuple[str, ...]
    steps: tuple[TypedStep, ...]

    @property
    def findings(self) -> tuple[TypeFinding, ...]:
        """The findings of all roles, mismatches first, each once."""
        found = {finding.text: finding for step in self.steps for finding in step.findings}
        return tuple(sorted(found.values(), key=lambda finding: not finding.is_certain))

    @property
    def mismatches(self) -> tuple[TypeFinding, ...]:
        """Findings that are certain."""
        return tuple(finding for finding in self.findings if finding.is_certain)

    @property
    def verdict(self) -> Verdict:
        """ "unknown" where an operation has no rule."""
        if self.mismatches:
            return "mismatch"
        return "unknown" if self.findings else "agrees"

    @property
    def lines(self) -> tuple[str, ...]:
        """The verdict, and the first findings."""
        if not self.axes:
            return ("types: no axis but the pipeline's has several ranks",)
        roles = counted(len(self.steps), "role")
        num_operations = sum(step.num_operations for step in self.steps)
        num_gradients = sum(step.num_gradients for step in self.steps)
        played = f"{num_operations:,} operations of {roles} of ranks"
        if not self.findings:
            axes = ", ".join(self.axes)
            return (
                f"types: every tensor of {roles} of ranks agrees along {axes},",
                f"  forward and backward: {num_operations:,} operations, {num_gradients:,} gradients",
            )
        if self.mismatches:
            head = counted(len(self.mismatches), "mismatch", "mismatches")
        else:
            head = f"unknown, {counted(len(self.findings), 'finding')}"
        lines = [f"types: {head} in {played}"]
        for finding in self.findings[:MOST_SHOWN]:
            lines += textwrap.wrap(
                finding.text, WIDTH, initial_indent="  ", subsequent_indent="    "
            )
        num_more = len(self.findings) - MOST_SHOWN
        if num_more > 0:
            lines.append(f"  and {num_more} more")
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "verdict": self.verdict,
            "axes": list(self.axes),
            "ranks_played": [step.rank for step in self.steps],
            "operations": sum(step.num_operations for step in self.steps),
            "gradients": sum(step.num_gradients for step in self.steps),
            "findings": [asdict(finding) for finding in self.findings],
        }


def certify(run: MeasuredRun) -> Certificate:
    """Type a step of every role of ranks; see Note [Roles of a certificate]."""
    plan = run.plan
    axes = typed_axes(plan.mesh)
    if not axes:
        return Certificate(plan.mesh.size, (), ())
    kinds = run.block_kinds()
    rows = {row_signature(plan, row, kinds): row for row in reversed(range(plan.pipeline_size))}
    known = KnownCalls()
    last = plan.table.microbatches - 1
    # the first micro-batch stores gradients, the last one adds to them and reduces
    at_first = tuple(sorted({0, last}))
    last_places = {axis: plan.mesh.degree(axis) - 1 for axis in axes}
    steps = []
    for row in sorted(rows.values()):
        for places, microbatches in (({}, at_first), (last_places, (last,))):
            rank = plan.mesh.rank(**{pipeline_axis(): row}, **places)
            steps.append(typed_step(run, rank, microbatches=microbatches, known=known))
    return Certificate(plan.mesh.size, axes, tuple(steps))
