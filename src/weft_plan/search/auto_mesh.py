"""The legal layouts of a run in the order of their predicted step, for `mesh = "auto"`."""

from __future__ import annotations

from dataclasses import dataclass

from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import size_problem
from weft.planner.simulate.predict import predict
from weft.planner.simulate.speeds import Speeds
from weft_plan.search.candidates import Candidates
from weft_plan.search.found_layouts import Found, by_time
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_costs import LayoutCosts
from weft_plan.search.limits import SearchLimits
from weft_plan.search.search import search

MOST_PREDICTED = 3
"""Layouts that are all predicted; of more the search measures the first ones."""
MOST_MEASURED = 2
"""Layouts that the search measures."""


@dataclass(frozen=True)
class MeshRanking:
    """The layouts that fit, fastest first.

    Attributes:
        meshes: with the seconds of a predicted step.
        is_complete: all candidates have been predicted, or are slower by a bound.
        least_bytes: of the layout with the least memory where none fits, as far as it is known.
    """

    meshes: tuple[tuple[str, float], ...]
    is_complete: bool
    least_bytes: float | None = None


def rank_meshes(
    run: MeasuredRun, found: Candidates, speeds: Speeds, memory_bytes: float
) -> MeshRanking:
    """The fastest candidates that fit.

    Args:
        found: candidates that differ in the mesh, and perhaps in recomputation.
        memory_bytes: that a rank may use.

    Raises:
        PlanError: a layout is too large to be measured.
    """
    layouts = [layout for group in found.groups for layout in group]
    if run.plan.schedule_lines or _are_few_and_small(run, layouts):
        return _rank_all(run, layouts, speeds, memory_bytes)
    limits = SearchLimits(memory_bytes, MOST_MEASURED, has_front=False, splits=False, reorders=True)
    costs = LayoutCosts(run, speeds)
    result = search(found, costs, limits, target="time")
    least_bytes = None
    if result.smallest is not None:
        least_bytes, _ = result.smallest
    is_complete = not result.best or result.is_proven
    return _ranking(result.best, least_bytes, is_complete=is_complete)


def _are_few_and_small(run: MeasuredRun, layouts: list[Layout]) -> bool:
    if len(layouts) > MOST_PREDICTED:
        return False
    for layout in layouts:
        changed = run.with_layout(layout.values)
        if size_problem(changed.plan, fixed_order=changed.config.fixed_order) is not None:
            return False
    return True


def _rank_all(
    run: MeasuredRun, layouts: list[Layout], speeds: Speeds, memory_bytes: float
) -> MeshRanking:
    entries: list[Found] = []
    for layout in layouts:
        changed = run.with_layout(layout.values)
        entries.append(Found(layout, predict(changed, speeds)))
    fitting = [entry for entry in entries if entry.peak_bytes <= memory_bytes]
    fitting.sort(key=by_time)
    least_bytes = min(entry.peak_bytes for entry in entries)
    return _ranking(fitting, least_bytes, is_complete=True)


def _ranking(best: list[Found], least_bytes: float | None, *, is_complete: bool) -> MeshRanking:
    fastest: dict[str, float] = {}
    for entry in best:
        fastest.setdefault(entry.layout.mesh, entry.seconds)
    meshes = tuple(fastest.items())
    return MeshRanking(meshes, is_complete, None if meshes else least_bytes)
