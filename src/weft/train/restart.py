"""Owns how all ranks begin together: from starting values, or from a checkpoint that every byte of is right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.folder import Found, checkpoints, remove_leftovers
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.read import Checkpoint, open_checkpoint
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.data.samples import Samples
from weft.errors import CheckpointError, DataError, Fault
from weft.train.agree import agree, words_of_first
from weft.train.build import build_step
from weft.train.checkpoint import load_parameters, restore
from weft.train.resume import data_changes, find
from weft.train.state import MODEL
from weft.train.step import TrainStep

ASIDE = "aside-"
"""Before the name of a checkpoint that the run no longer stands on: it is kept, and never looked at again."""


@dataclass(frozen=True)
class Begun:
    """A step to train with, and where it comes from.

    Attributes:
        steps: optimizer steps that are done.
        path: the checkpoint; None: starting values.
        layout: who wrote it, in words.
        passed_over: newer checkpoints that are broken, and how.
    """

    step: TrainStep
    steps: int = 0
    path: Path | None = None
    layout: str = ""
    passed_over: tuple[str, ...] = ()

    def events(self, run: Run, moved: Sequence[Path]) -> Iterator[dict[str, Any]]:
        """What is told of it; `moved` are checkpoints that were set aside."""
        if run.resume is not None:
            path = str(self.path) if self.path else None
            passed_over = list(self.passed_over)
            yield {
                "event": "resume",
                "step": self.steps,
                "path": path,
                "layout": self.layout,
                "passed_over": passed_over,
            }
        for place in moved:
            yield {"event": "note", "text": f"a checkpoint of later steps is kept as {place}: the run goes another way"}
        if self.steps >= run.steps:
            yield {"event": "note", "text": f"all {run.steps} steps are done: to train more, raise --steps"}


def begin(run: Run, comm: Comm, samples: Samples) -> Begun:
    """The step of `run`, gone on from where `run.resume` says; every rank must call it.

    Raises:
        CheckpointError: no checkpoint that is named is whole, or it is of another run; the same on all ranks.
        DataError: the source is not what the checkpoint was trained on.
    """
    if run.resume is None:
        return Begun(build_step(run, comm))
    chosen, passed_over = _newest_whole(run, comm)
    if chosen is None:
        return Begun(build_step(run.model_copy(update={"resume": None}), comm))
    facts = chosen.manifest.facts
    if faults := tuple(data_changes(facts.data, samples.facts())):
        raise DataError(*faults)
    step = build_step(run, comm)
    if not facts.plan:  # nobody has trained it here: it was imported
        load_parameters(step, chosen.section(MODEL))
    else:
        restore(step, chosen)
    layout = (str(facts.plan["mesh"]) or "one rank") if facts.plan else "an import"
    return Begun(step, facts.step, chosen.path, layout, tuple(map(str, passed_over)))


def clear(run_folder: Path, comm: Comm, *, above: int) -> tuple[Path, ...]:
    """Have the folder ready for a run that goes on from `above` steps; every rank must call it. Returns what was renamed."""
    moved: tuple[Path, ...] = ()
    if comm.rank == 0:
        remove_leftovers(run_folder)
        moved = set_aside(run_folder, above=above)
    comm.barrier(tuple(name for name, _ in comm.mesh.axes))
    return moved


def set_aside(run_folder: Path, *, above: int) -> tuple[Path, ...]:
    """Rename checkpoints of more than `above` steps: the run goes another way from there. One rank calls it."""
    moved = []
    for path in [path for steps, path in checkpoints(run_folder) if steps > above]:
        names = (path.with_name(f"{ASIDE}{path.name}" + f"-{n}" * (n > 1)) for n in range(1, 1000))
        moved.append(path.rename(next(name for name in names if not name.exists())))
    return tuple(moved)


def _newest_whole(run: Run, comm: Comm) -> tuple[Checkpoint | None, tuple[Fault, ...]]:
    """The newest checkpoint whose every byte is right, and what is wrong with newer ones; None where there is none at all."""
    faults: tuple[Fault, ...] = ()
    below: int | None = None
    while True:
        path, broken = _choose(run, comm, below=below)
        faults += broken
        if path is None and faults:
            raise CheckpointError(*faults)
        if path is None:
            return None, ()
        try:
            return _verified(path, comm), faults
        except CheckpointError as error:
            faults += error.faults
            below = read_manifest(path).facts.step


def _choose(run: Run, comm: Comm, *, below: int | None) -> tuple[Path | None, tuple[Fault, ...]]:
    """What rank 0 finds, told to all."""
    found = Found(None, None, ())

    def look() -> None:
        nonlocal found
        if comm.rank == 0:
            found = find(run, below=below)

    agree(comm, look)
    told = words_of_first(comm, json.dumps([str(found.path or ""), [vars(fault) for fault in found.faults]]))
    name, faults = json.loads(told)
    return (Path(name) if name else None), tuple(Fault(**fault) for fault in faults)


def _verified(path: Path, comm: Comm) -> Checkpoint:
    """The checkpoint, of which each rank has read its share of all bytes."""
    opened: list[Checkpoint] = []

    def verify() -> None:
        opened.append(open_checkpoint(path))
        opened[0].verify(comm.rank, comm.mesh.size)

    agree(comm, verify)
    return opened[0]
