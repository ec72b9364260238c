"""Which steps of a run are compared with one device while it trains, and the check that does it on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.comm.text import broadcast_text
from weft.config.run import Run
from weft.prove.live_step.check import LiveStepCheck
from weft.prove.live_step.due import Due
from weft.prove.subject import LiveTask
from weft.start.proved_runs import is_proved
from weft.train.step_check import ProofRecord
from weft.train.training import Training


@dataclass(frozen=True)
class LiveProof:
    """What `prove.before` and `prove.during` ask for.

    Attributes:
        is_first: whether the first step of each start is compared.
        every: steps after which another one is; 0: none is.
        is_new: whether the run does not resume from a checkpoint.
    """

    task: LiveTask
    is_first: bool
    every: int
    is_new: bool

    @staticmethod
    def of(run: Run, environ: Mapping[str, str]) -> LiveProof:
        """That of a run."""
        return LiveProof(
            task=LiveTask.of(run),
            is_first=is_proved(run, environ),
            every=run.prove.during,
            is_new=run.resume is None,
        )

    def attached(self, training: Training, record: ProofRecord, *, is_restart: bool) -> Training:
        """The training run of this rank with the check; every rank must call it.

        Args:
            is_restart: whether ranks were started again on the layout that was compared before.
        """
        comm = training.step.model.comm
        is_first = self.is_first and not is_restart
        if not broadcast_text(comm, "compared" if is_first or self.every else ""):
            return training
        # Rank 0 decides: the environment of other machines may be another one.
        is_first = broadcast_text(comm, "first" if is_first else "") == "first"
        due = Due(training.step_range.start + 1 if is_first else None, self.every)
        check = LiveStepCheck(training, self.task, due=due, record=record, is_new=self.is_new)
        return replace(training, check=check)
