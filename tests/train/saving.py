"""Owns saving a step in tests: at once, without a run around it."""

from __future__ import annotations

from pathlib import Path

from weft.core.config import Run
from weft.save.folder import temporary_path
from weft.save.format import Facts
from weft.save.held import snapshot
from weft.save.write import commit, start_write
from weft.train.checkpoint import held
from weft.train.step import TrainStep


def save(step: TrainStep, final: Path, run: Run) -> None:
    """Write the checkpoint `final` from all ranks, and return when it is there."""
    comm, plan = step.model.comm, step.model.plan
    tmp, everyone = temporary_path(final), tuple(name for name, _ in comm.mesh.axes)
    start_write(tmp, comm.rank, snapshot(held(step))).wait()
    comm.barrier(everyone)
    if comm.rank == 0:
        facts = Facts(
            step=0,
            seed=run.seed,
            family=plan.family,
            architecture=run.model.architecture,
            plan=plan.model_dump(mode="json"),
        )
        commit(tmp, final, facts, ranks=comm.mesh.size)
    comm.barrier(everyone)
