"""One start of the ranks in a proof: they train to some step as `weft train` does, and record what they compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.comm.comm import Comm
from weft.prove.raw_batch import FirstSamples
from weft.prove.record import RankRecord
from weft.prove.recorder import Recorder
from weft.prove.subject import Subject, shortened
from weft.run.world import Attempt
from weft.train.evaluate import Evaluation, eval_event
from weft.train.event_log import EventLog
from weft.train.loop import run_training
from weft.train.training import Evaluator, Training


@dataclass(frozen=True)
class TrainedPart:
    """The steps of a run between a start of its ranks and the next one.

    Attributes:
        out: run folder.
        resume: as the key.
        total: the last step that is trained.
        saves: whether a checkpoint is saved at its end.
        attempt: of a supervised rank; None: nothing supervises it.
        evaluates: whether an evaluation follows the last step.
        evaluates_between: whether one follows every step, after which training goes on: it must leave
            everything as it was.
    """

    out: str
    total: int
    resume: str | None = None
    saves: bool = False
    attempt: Attempt | None = None
    evaluates: bool = False
    evaluates_between: bool = False

    @property
    def restores(self) -> bool:
        """Whether it starts from a stored state."""
        is_restart = self.attempt is not None and self.attempt.restart is not None
        return self.resume is not None or is_restart

    def train(self, subject: Subject, comm: Comm, *, record: RankRecord) -> Training:
        """Train on this rank, and add what it computes to its record; the training run as it ends."""
        # The `Comm` is used after this part, too, where nothing is to be recorded any more.
        observers = comm.observers
        record.progress.is_restoring = self.restores
        training = subject.build_training(
            comm, out=self.out, resume=self.resume, attempt=self.attempt
        )
        recorder = Recorder(record, training)
        training = recorder.attach(training)
        if self.restores:
            recorder.record_state(
                training.step_range.start, moments="checkpoint", params="checkpoint"
            )
            record.progress.is_restoring = False
        between = None
        if self.evaluates_between:
            one_batch = _evaluation(training, most_batches=1)
            between = Evaluator(one_batch, every=1, total_steps=self.total)
        training = shortened(training, total=self.total, saves=self.saves, evaluator=between)
        run_training(training, EventLog(None, [recorder]))
        if training.snapshots is not None:
            # A snapshot that is still being copied would be missing where the next part starts from it.
            for _ in training.snapshots.wait():
                pass
        if self.evaluates:
            record.progress.phase = "evaluate"
            recorder.handle(eval_event(self.total, _evaluation(training, most_batches=0)()))
        comm.observers = observers
        return training


def _evaluation(training: Training, *, most_batches: int) -> Evaluation:
    """An evaluation on the first samples, whose last batch is not full."""
    loader = training.loader
    first = FirstSamples.of(loader.samples, global_size=loader.global_size)
    return Evaluation(
        training.step.model,
        replace(loader, samples=first),
        most_batches=most_batches,
        kl=training.step.kl,
    )
