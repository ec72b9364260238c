"""Guards of a training run: what follows a step that failed (stop, skip, rollback), and its record in the run folder.

A step fails if its loss, gradient norm or a gradient is not finite, or if its loss is a spike. Under
`rollback` the run goes back to its newest checkpoint, and batches are left out from then on:

    nonfinite   the batch of the failed step
    spike       the batches from the checkpoint to the failed step: the update before the spike may
                have caused it

Note [Data order after a rollback]
    Step k (from 0) trains on batch k of the run's order, not counting the left-out ones
    (`weft.data.order.batch_of_step`). Their numbers are stored in every later checkpoint, and in
    the record of the failed step, which a resume in the same run folder reads. So the order is a
    pure function of recorded facts, whatever the layout.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weft.checkpoint.disk import replace_file
from weft.config.schema import GuardConfig
from weft.core.dimension import sequence_axes
from weft.core.mesh import Mesh
from weft.data.order import batch_of_step, layout_of
from weft.train.data_loader import DataLoader, samples_of
from weft.train.event_lines import to_line
from weft.train.guard_records import GuardState, unused_record_path
from weft.train.nonfinite import NonFiniteValue
from weft.train.step import StepReport, nonfinite_text

Kind = Literal["nonfinite", "spike"]
Action = Literal["report", "skip", "rollback", "stop"]

MIN_LOSSES = 8
"""Losses before the first comparison."""
MAX_SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class FailedStep:
    """A step whose result a guard does not accept.

    Attributes:
        step: its number (the first is 1).
        batch: number of the batch that it trained on.
        value: the first non-finite value; None for a spike.
        samples: global numbers of all samples of the batch.
        suspects: those of the micro-batches in which the first non-finite value is; all of them if
            it is a sum over micro-batches.
    """

    kind: Kind
    action: Action
    step: int
    batch: int
    loss: float
    grad_norm: float
    value: NonFiniteValue | None
    samples: tuple[int, ...]
    suspects: tuple[int, ...]
    reason: str

    @property
    def text(self) -> str:
        """`step 8: the loss is nan ...; first in ...; samples 17 42`."""
        return f"step {self.step}: {self.reason}; {samples_text(self.suspects)}"

    def event(self) -> dict[str, Any]:
        """The `guard` event of events.jsonl."""
        value = self.value
        event: dict[str, Any] = {
            "event": "guard",
            "kind": self.kind,
            "step": self.step,
            "action": self.action,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "batch": self.batch,
            "samples": list(self.suspects),
        }
        if value is not None:
            event |= {"rank": value.rank, "block": value.block, "place": value.place}
        event["text"] = f"guard: {self.text}. {CONSEQUENCES[self.action]}"
        return event


CONSEQUENCES: Mapping[Action, str] = {
    "report": "Training continues",
    "skip": "The update is skipped",
    "rollback": "Going back to the newest checkpoint, without these samples",
    "stop": "Stopping",
}


@dataclass(frozen=True)
class Restored:
    """The state that a rollback went back to.

    Attributes:
        num_done: finished steps of the checkpoint.
        source: its folder.
        state: of the guards, as it stored them.
        event: for the event log.
    """

    num_done: int
    source: str
    state: GuardState
    event: dict[str, Any]


def no_restore() -> Restored:
    """Stands for the restore of a run without a run folder."""
    raise AssertionError("a run without a run folder has nothing to go back to")


class StepGuard:
    """Judges every step of a run, and keeps the list of left-out batches; the same on every rank.

    Args:
        config: what follows a failed step.
        loader: knows the samples of a batch.
        restore: loads the newest checkpoint; every rank must call it.
        needs_first_save: whether a rollback needs a checkpoint that does not exist yet.
        record_folder: where the first rank records failed steps; None on the others.

    Attributes:
        state: see `GuardState`.
    """

    def __init__(
        self,
        config: GuardConfig,
        loader: DataLoader,
        mesh: Mesh,
        *,
        state: GuardState | None = None,
        restore: Callable[[], Restored] = no_restore,
        needs_first_save: bool = False,
        record_folder: Path | None = None,
        start: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.loader = loader
        self.mesh = mesh
        self.state = state or GuardState()
        self.restore = restore
        self.needs_first_save = needs_first_save and can_roll_back(config)
        self.record_folder = record_folder
        self.facts = dict(start or {})
        self._failed_at = 0

    def batch_of(self, index: int) -> int:
        """Number of the batch of step `index` (from 0)."""
        return batch_of_step(index, self.state.skipped_batches)

    def samples_of(self, step: int) -> tuple[int, ...]:
        """Numbers of the samples of step `step` (the first is 1)."""
        loader = self.loader
        chosen = samples_of(
            loader.samples,
            self.batch_of(step - 1),
            global_size=loader.global_size,
            seed=loader.seed,
        )
        return tuple(chosen.tolist())

    def judge(self, step: int, report: StepReport) -> FailedStep | None:
        """Why step `step` (the first is 1) failed, and what follows; None if it is accepted."""
        failed = self._failure(step, report)
        if failed is None or failed.action == "report":
            self._accept(step, report.loss)
            return failed
        # After a rollback the steps up to this one pass again; they end no row of failures.
        self._failed_at = max(step, self._failed_at)
        num_failures = self.state.failures + 1
        self.state = replace(self.state, failures=num_failures)
        most = self.config.max_failures
        if failed.action != "stop" and num_failures > most:
            failed = replace(
                failed, action="stop", reason=f"{failed.reason}; {most} failed before it in a row"
            )
        if failed.action != "rollback":
            self._record(failed, skipped_before=self.state.skipped_batches)
        return failed

    def roll_back(self, failed: FailedStep) -> Restored:
        """Restore the newest checkpoint and leave out the batches of the failed step; every rank
        must call it.
        """
        restored = self.restore()
        self.state = replace(self.state, losses=restored.state.losses)
        left_out = [failed.batch]
        if failed.kind == "spike":
            # By the order that these steps had, before further batches are left out.
            left_out = [self.batch_of(index) for index in range(restored.num_done, failed.step)]
        self.facts |= {"start_step": restored.num_done, "checkpoint": restored.source}
        skipped_before = self.state.skipped_batches
        self.state = self.state.without_batches(left_out)
        self._record(failed, skipped_before=skipped_before, left_out=left_out)
        return restored

    def _accept(self, step: int, loss: float) -> None:
        if step >= self._failed_at:
            self.state = replace(self.state, failures=0)
        if self.config.spike:
            self.state = self.state.with_loss(loss)

    def _failure(self, step: int, report: StepReport) -> FailedStep | None:
        if report.nonfinite is not None:
            reason = nonfinite_text(report.loss, report.grad_norm, report.nonfinite)
            return self._failed_step(
                "nonfinite", self.config.nonfinite, step, report, reason=reason
            )
        losses = self.state.losses
        if not self.config.spike or len(losses) < MIN_LOSSES:
            return None
        median = statistics.median(losses)
        if report.loss <= spike_bound(median, factor=self.config.spike):
            return None
        if median > 0:
            times = f"{report.loss / median:.3g} times "
        else:
            times = "far above "
        reason = (
            f"the loss is {report.loss:.4g}, {times}the median "
            f"{median:.4g} of the last {len(losses)} steps"
        )
        return self._failed_step("spike", self.config.on_spike, step, report, reason=reason)

    def _failed_step(
        self, kind: Kind, action: Action, step: int, report: StepReport, *, reason: str
    ) -> FailedStep:
        samples = self.samples_of(step)
        suspects = samples
        value = report.nonfinite
        if value is not None and value.rank is not None and value.micro_batches:
            axes = sequence_axes()
            by_micro_batch = layout_of(
                np.array(samples),
                index=self.mesh.index(value.rank, axes),
                degree=self.mesh.degree(axes),
                micro_size=self.loader.micro_size,
                outer=self.loader.outer,
            )
            suspects = tuple(by_micro_batch[list(value.micro_batches)].ravel().tolist())
        return FailedStep(
            kind=kind,
            action=action,
            step=step,
            batch=self.batch_of(step - 1),
            loss=report.loss,
            grad_norm=report.grad_norm,
            value=value,
            samples=samples,
            suspects=suspects,
            reason=reason,
        )

    def _record(
        self, failed: FailedStep, *, skipped_before: Sequence[int], left_out: Sequence[int] = ()
    ) -> None:
        """Write the record of a failed step, on the first rank.

        Args:
            skipped_before: the batches that were left out when it failed.
            left_out: further ones, from here on.
        """
        if self.record_folder is None:
            return
        places = [self.loader.samples.place(sample) for sample in failed.suspects]
        record = {
            **asdict(failed),
            "left_out": list(left_out),
            "skipped_batches": list(skipped_before),
            "places": places[:MAX_SAMPLES_SHOWN],
            "seed": self.loader.seed,
            "mesh": str(self.mesh),
            **self.facts,
        }
        self.record_folder.mkdir(parents=True, exist_ok=True)
        replace_file(unused_record_path(self.record_folder, failed.step), to_line(record))


def spike_bound(median: float, *, factor: float) -> float:
    """The largest loss that is no spike: `factor` times the median; as far above a median that is
    not positive, as losses of a user's model may be.

    >>> spike_bound(2.0, factor=3), spike_bound(-2.0, factor=3)
    (6.0, 2.0)
    """
    if median > 0:
        return factor * median
    return median + (factor - 1) * abs(median)


def can_roll_back(config: GuardConfig) -> bool:
    """Whether a guard may go back to a checkpoint."""
    rolls_back_spikes = config.spike > 0 and config.on_spike == "rollback"
    return config.nonfinite == "rollback" or rolls_back_spikes


def samples_text(samples: Sequence[int]) -> str:
    """`sample 17`, `samples 17 42`, or the first of many and their number."""
    noun = "sample" if len(samples) == 1 else "samples"
    numbers = [str(sample) for sample in samples[:MAX_SAMPLES_SHOWN]]
    text = f"{noun} {' '.join(numbers)}"
    num_hidden = len(samples) - MAX_SAMPLES_SHOWN
    if num_hidden > 0:
        text += f" and {num_hidden} more"
    return text
