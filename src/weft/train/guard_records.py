"""What guards remember: the state that checkpoints store, and the records of failed steps in a run folder. No torch.

RUN/guard/step-000008.json      step 8 failed: loss, norm, batch, samples, block, rank, what followed
RUN/guard/step-000008-2.json    it failed again, after a rollback
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.data.order import batch_of_step
from weft.small_files import UnreadableFile
from weft.train.event_lines import read_events

FOLDER = "guard"
WINDOW = 32
"""Losses whose median a loss is compared with."""


@dataclass(frozen=True)
class StepToRepeat:
    """A step of a recorded run, and how to reach it.

    Attributes:
        number: the step (the first is 1).
        loss, grad_norm: as recorded; None if the run has no result of this step.
        record: of the failed step, if it failed.
        checkpoint: where to start; None: the initial parameters.
        num_done: steps that it has done.
        skipped_batches: batches that no step trains on.
        lrs: step -> recorded learning rate.
        not_updated: steps whose update a guard skipped.
        has_started_again: whether the run was started again after the failure, so that its config may
            have other keys now.
    """

    number: int
    loss: float | None
    grad_norm: float | None
    record: Mapping[str, Any] | None
    checkpoint: Path | None
    num_done: int
    skipped_batches: tuple[int, ...]
    lrs: Mapping[int, float]
    not_updated: frozenset[int]
    has_started_again: bool = False


@dataclass(frozen=True)
class GuardState:
    """What the guards of a run remember between steps; part of every checkpoint.

    Attributes:
        skipped_batches: numbers of the batches that no step trains on, ascending.
        losses: the newest finite ones, at most `WINDOW`; none if spikes are not looked for.
        failures: failed steps in a row.
    """

    skipped_batches: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    failures: int = 0

    def position(self, num_steps: int, *, global_size: int) -> dict[str, Any]:
        """The field `position` of a checkpoint's facts: the samples before the next batch, and what
        differs from a run in which nothing failed.
        """
        next_batch = batch_of_step(num_steps, self.skipped_batches)
        position: dict[str, Any] = {"steps": num_steps, "samples": next_batch * global_size}
        position.update({key: value for key, value in asdict(self).items() if value})
        return position

    @staticmethod
    def of_position(position: Mapping[str, Any]) -> GuardState:
        """The state that `position` stored."""
        return GuardState(
            skipped_batches=tuple(position.get("skipped_batches", ())),
            losses=tuple(position.get("losses", ())),
            failures=int(position.get("failures", 0)),
        )

    def with_loss(self, loss: float) -> GuardState:
        """The state after a step with this loss."""
        losses = (*self.losses, loss)
        return replace(self, losses=losses[-WINDOW:])

    def without_batches(self, batches: Iterable[int]) -> GuardState:
        """The state with further batches left out."""
        merged = sorted({*self.skipped_batches, *batches})
        return replace(self, skipped_batches=tuple(merged))


def unused_record_path(folder: Path, step: int) -> Path:
    """`step-000008.json`; for a step that failed before `step-000008-2.json`, and so on."""
    path = folder / f"step-{step:06d}.json"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"step-{step:06d}-{number}.json"
    return path


def read_records(run_folder: Path) -> tuple[dict[str, Any], ...]:
    """The records of failed steps in a run folder, by name; those that cannot be read are left out."""
    records = []
    for path in sorted((run_folder / FOLDER).glob("step-*.json")):
        try:
            lines = list(read_events(path))
        except (UnreadableFile, ValueError):
            continue
        records += [line for line in lines if is_record(line)]
    return tuple(records)


def left_out_batches(records: Iterable[Mapping[str, Any]], *, first: int) -> tuple[int, ...]:
    """Batches from number `first` on that rollbacks have left out."""
    found: set[int] = set()
    for record in records:
        for batch in record.get("left_out", ()):
            if isinstance(batch, int) and batch >= first:
                found.add(batch)
    return tuple(sorted(found))


def is_record(line: Mapping[str, Any]) -> bool:
    """Whether a line has the fields of a record that readers count on."""
    for key in ("step", "batch"):
        number = line.get(key)
        if type(number) is not int or number < 0:
            return False
    left_out = line.get("left_out", [])
    skipped_batches = line.get("skipped_batches", [])
    return isinstance(left_out, list) and isinstance(skipped_batches, list)
