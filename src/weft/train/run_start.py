"""Where a run starts: initial parameters, a checkpoint, or a snapshot in memory; and its restoration into the step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.checkpoint.folder import checkpoints
from weft.checkpoint.kept import KEPT_PREFIX, kept_folder_of
from weft.checkpoint.node_memory import NodeMemory, assemble
from weft.checkpoint.read import Checkpoint
from weft.checkpoint.restore import open_newest_valid
from weft.checkpoint.resume import AUTO, data_changes, is_other_optimizer
from weft.comm.comm import Comm
from weft.comm.text import all_gather_text
from weft.data.samples import Samples
from weft.errors import CheckpointError, DataError, Fault, GuardError
from weft.run.world import Attempt, Restart
from weft.train.guard import Restored
from weft.train.guard_records import GuardState
from weft.train.step import TrainStep
from weft.train.training import Event

StateSource = Literal["memory", "checkpoint", "start"]


@dataclass(frozen=True)
class StartState:
    """The state that a run starts from.

    Attributes:
        checkpoint: None: initial parameters.
        passed_over: newer checkpoints that are damaged, and how.
        source: where it is stored, of ranks that were started again.
    """

    checkpoint: Checkpoint | None = None
    passed_over: tuple[str, ...] = ()
    source: StateSource = "start"

    @property
    def guard(self) -> GuardState:
        """What the guards of the run remember."""
        if self.checkpoint is None:
            return GuardState()
        return GuardState.of_position(self.checkpoint.manifest.facts.position)

    @property
    def path(self) -> str | None:
        """The folder of the checkpoint."""
        if self.checkpoint:
            return str(self.checkpoint.path)
        return None

    @property
    def num_done(self) -> int:
        """Optimizer steps that are done."""
        if self.checkpoint:
            return self.checkpoint.manifest.facts.step
        return 0

    def num_saved_in(self, run_folder: Path) -> int:
        """Steps of the checkpoint that is stored on the disk of a run already; a snapshot, and what
        was kept in memory, is not.
        """
        if self.source == "memory" or self.checkpoint is None:
            return 0
        is_kept = kept_folder_of(self.checkpoint.path) is not None
        is_named = self.checkpoint.path.parent.parent.name.startswith(KEPT_PREFIX)
        return 0 if is_kept or is_named else self.num_done

    @property
    def is_import(self) -> bool:
        """Whether the checkpoint is an imported model, which has parameters only."""
        return self.checkpoint is not None and not self.checkpoint.manifest.facts.plan

    @property
    def layout(self) -> str:
        """The layout that wrote the checkpoint, as text."""
        if self.checkpoint is None:
            return ""
        if self.is_import:
            return "an import"
        return str(self.checkpoint.manifest.facts.plan["mesh"]) or "one rank"

    def check_data(self, samples: Samples) -> None:
        """Check that the run reads the data that the checkpoint was trained on.

        Raises:
            DataError: it does not.
        """
        if self.checkpoint is None:
            return
        changes = tuple(data_changes(self.checkpoint.manifest.facts.data, samples.facts()))
        if changes:
            raise DataError(*changes)

    def restore(self, step: TrainStep, optim: Mapping[str, Any] | None = None) -> None:
        """Load the checkpoint, if any, into the step; of an import the parameters only. Every rank
        must call it.

        Args:
            optim: section `optim` of the run, as JSON; with `on_change = fresh` the state of
                another optimizer is not loaded.
        """
        if self.checkpoint is None:
            return
        may_reset = optim is not None and optim["on_change"] == "fresh"
        facts = self.checkpoint.manifest.facts
        if self.is_import or (may_reset and is_other_optimizer({"optim": optim}, facts)):
            step.restore_parameters(self.checkpoint)
        else:
            step.restore(self.checkpoint, may_reset_optimizer=may_reset)
        step.set_position(self.num_done)

    def resume_event(self) -> Event:
        """The `resume` event of events.jsonl."""
        return {
            "event": "resume",
            "step": self.num_done,
            "path": self.path,
            "layout": self.layout,
            "passed_over": list(self.passed_over),
        }

    def restart_event(self, restart: Restart, *, num_steps: int) -> Event:
        """The `restart` event of events.jsonl, of a run of `num_steps`."""
        return {
            "event": "restart",
            "attempt": restart.number,
            "of": restart.most,
            "step": self.num_done,
            "steps": num_steps,
            "source": self.source,
            "rank": restart.rank,
            "reason": restart.reason,
            "detected_s": restart.detected_s,
            "recovered_s": time.monotonic() - restart.at_s,
        }


def find_start(
    comm: Comm, *, out: str | None, resume: str | None, attempt: Attempt | None = None
) -> StartState:
    """The state that a run starts from: the checkpoint that `resume` means, if there is one, or
    after a restart the newest snapshot or checkpoint; every rank must call it.
    """
    checkpoint: Checkpoint | None = None
    faults: Sequence[Fault] = ()
    source: StateSource = "start"
    if attempt is not None and attempt.restart is not None:
        for folder in _state_folders(Path(out or ""), attempt):
            try:
                checkpoint, faults = open_newest_valid(str(folder.path), None, comm)
            except CheckpointError:  # on all ranks: no state there is valid
                continue
            if checkpoint is not None:
                source = folder.source
                break
    elif attempt is not None and attempt.node and resume == AUTO:
        checkpoint, faults = _open_newer_snapshot(comm, attempt, Path(out or ""))
        source = "memory" if checkpoint is not None else source
    if checkpoint is None and resume is not None:
        checkpoint, faults_on_disk = open_newest_valid(resume, out, comm)
        faults = (*faults, *faults_on_disk)
    passed_over = tuple(str(fault) for fault in faults)
    if checkpoint is None:
        return StartState(passed_over=passed_over)
    return StartState(checkpoint=checkpoint, passed_over=passed_over, source=source)


def _open_newer_snapshot(
    comm: Comm, attempt: Attempt, run_folder: Path
) -> tuple[Checkpoint | None, Sequence[Fault]]:
    """The newest whole snapshot in the memory of the nodes, if it is newer than all checkpoints of
    the run; every rank must call it.
    """
    newest = next(checkpoints(run_folder), None)
    own_step = newest[0] if newest is not None else 0
    steps = all_gather_text(comm, str(own_step))
    # Nodes may have folders of their own; a snapshot has to be newer than what any of them has saved.
    newest_on_disk = max(int(step) for step in steps)
    memory = NodeMemory.of(comm, attempt.memory_folder, attempt.node)
    if memory is None:
        return None, ()
    try:
        checkpoint = assemble(
            comm, memory, above=newest_on_disk, expects_one=attempt.num_restarts > 0
        )
    except CheckpointError as error:  # on all ranks
        return None, error.faults
    return checkpoint, ()


@dataclass(frozen=True)
class _StateFolder:
    """A folder with states of a run."""

    newest_step: int
    source: StateSource
    path: Path


def _state_folders(run_folder: Path, attempt: Attempt) -> list[_StateFolder]:
    """Where a run that is started again finds its state, the newest first. No rank writes now."""
    folders: list[_StateFolder] = []
    candidates: list[tuple[StateSource, Path]] = []
    if attempt.memory_folder is not None:
        candidates.append(("memory", attempt.memory_folder))
    if attempt.restart is not None and attempt.restart.had_started:
        candidates.append(("checkpoint", run_folder))
    for source, folder in candidates:
        newest = next(checkpoints(folder), None)
        if newest is not None:
            folders.append(_StateFolder(newest_step=newest[0], source=source, path=folder))
    folders.sort(key=lambda folder: folder.newest_step, reverse=True)
    return folders


def restore_newest(
    step: TrainStep, run_folder: Path, optim: Mapping[str, Any] | None = None
) -> Restored:
    """Load the newest valid checkpoint of the run folder into a training step; every rank must call
    it.

    Args:
        optim: as of `StartState.restore`.

    Raises:
        CheckpointError: no checkpoint is valid.
        GuardError: there is none.
    """
    state = find_start(step.model.comm, out=str(run_folder), resume=AUTO)
    if state.checkpoint is None:
        raise GuardError(f"there is no checkpoint in {run_folder} to go back to")
    state.restore(step, optim)
    return Restored(
        num_done=state.num_done,
        source=str(state.checkpoint.path),
        state=state.guard,
        event=state.resume_event(),
    )
