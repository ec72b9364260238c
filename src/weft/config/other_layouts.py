"""Layouts on which a run can go on: another mesh with the same batches, fewer ranks after an elastic change. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.elastic import fit_to_ranks
from weft.config.rules.layout import statistics_are_of_ranks
from weft.config.rules.suggestions import sizes_of_statistics
from weft.config.run import Run
from weft.config.schema import ParallelConfig, PipelineConfig
from weft.config.small_runs import is_valid
from weft.core.axes import local_update_axis
from weft.core.dimension import data_axis

ONE_RANK = ""
MESHES = ("tp2", "pp2", "dp2", "ep2", "cp2", "dp3", "tp3")
"""Meshes that are tried, none of which has more ranks than a proof runs quickly."""
OWN_OPTIONS: Mapping[str, Any] = {"parallel": ParallelConfig(), "pipeline": PipelineConfig()}
"""The options of a layout, in place of those that only the run's own layout takes."""


def on_mesh(run: Run, mesh: str) -> Run | None:
    """The run on another mesh, with its global batch; None where that is not valid.

    Options of the layout are kept where the other mesh takes them; else they have their defaults.
    BatchNorm normalises as many samples together, of which a rank may have more or fewer.
    """
    for options in ({}, OWN_OPTIONS):
        changed = _with_statistics_of_ranks(run.with_values({"mesh": mesh, **options}))
        if is_valid(changed):
            return changed
    return None


def _with_statistics_of_ranks(run: Run) -> Run:
    """The run, with another size of micro-batches where `batch.statistics_size` is not that of some."""
    mesh, batch = run.device_mesh, run.batch
    if not any(statistics_are_of_ranks(mesh, batch, run.model)):
        return run
    return run.with_values(next(sizes_of_statistics(mesh, batch)))


def other_meshes(run: Run) -> Iterator[str]:
    """Meshes that continue the run: one rank, and the first that shards along an axis that the run's
    own mesh has not.
    """
    own_axes = set(run.device_mesh.wide_axes)
    if own_axes:
        yield ONE_RANK
    for mesh in MESHES:
        axis = mesh.rstrip("0123456789")
        if axis not in own_axes and on_mesh(run, mesh) is not None:
            yield mesh
            return


def elastic_mesh(run: Run) -> str | None:
    """The mesh on which an elastic run goes on after it has lost ranks; None where it cannot.

    As `run.elastic` chooses it: the most ranks that are left, from which data ranks go first.
    """
    mesh = run.device_mesh
    if local_update_axis(mesh) is not None:
        return None

    def accepts(text: str) -> bool:
        return is_valid(run.with_values({"mesh": text}))

    for size in reversed(range(1, mesh.size)):
        found = fit_to_ranks(mesh, size, is_valid=accepts)
        if found is not None and _has_fewer_data_ranks(run, found):
            return found
    return None


def _has_fewer_data_ranks(run: Run, mesh: str) -> bool:
    data = data_axis()
    smaller = run.with_values({"mesh": mesh}).device_mesh
    return run.device_mesh.degree(data) == 1 or smaller.degree(data) < run.device_mesh.degree(data)
