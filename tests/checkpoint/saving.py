"""Save the state of a training step in tests, synchronously, without a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.checkpoint.commit import commit
from weft.checkpoint.folder import temporary_path
from weft.checkpoint.format import Facts
from weft.checkpoint.state import snapshot_of
from weft.checkpoint.write import start_write
from weft.config.run import Run
from weft.train.run_records import facts_of
from weft.train.step import TrainStep


def save(step: TrainStep, final: Path, run: Run, *, done: int = 0) -> None:
    """Write the checkpoint `final` behind `done` steps from all ranks, and return when it is there."""
    comm = step.model.comm
    tmp = temporary_path(final)
    everyone = tuple(name for name, _ in comm.mesh.axes)
    copied = snapshot_of(step.state())
    start_write(
        tmp, comm.rank, copied.items, digests=copied.digests, before=copied.under_way.wait
    ).wait()
    comm.barrier(everyone)
    if comm.rank == 0:
        facts = run_facts(run, step)(done)
        commit(tmp, final, facts, ranks=comm.mesh.size)
    comm.barrier(everyone)


def run_facts(run: Run, step: TrainStep) -> Callable[[int], Facts]:
    """The facts of a checkpoint of this run after a number of steps, without data."""
    return facts_of(run.model, run.model_dump(mode="json"), step, NoSamples())


class NoSamples:
    """A source of which nothing is read."""

    num_samples = 0

    def read(self, samples: Any) -> Any:
        raise NotImplementedError

    def facts(self) -> dict[str, object]:
        return {"sha256": "0123456789ab", "samples": 0}
