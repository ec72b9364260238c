"""Evaluation losses of a run: which checkpoint is the best, and when training stops because none is better."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from weft.checkpoint.folder import checkpoints, forget_best, recorded_best, write_best
from weft.comm.comm import Comm
from weft.comm.text import broadcast_text
from weft.errors import counted
from weft.small_files import UnreadableFile
from weft.train.event_lines import read_run_events
from weft.train.event_log import EVENTS


@dataclass(frozen=True)
class BestLoss:
    """The lowest evaluation loss, and the step after which it was computed."""

    step: int
    loss: float


@dataclass
class EvalHistory:
    """Evaluation losses by step, equal on every rank.

    Attributes:
        patience: evaluations in a row without a new lowest loss after which training stops; 0:
            never.
    """

    patience: int = 0
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> BestLoss | None:
        """The lowest loss, the first one where several are equal; None without any that is finite."""
        best: BestLoss | None = None
        for step in sorted(self.losses):
            loss = self.losses[step]
            lowest = float("inf") if best is None else best.loss
            if loss < lowest:
                best = BestLoss(step, loss)
        return best

    @property
    def num_since_best(self) -> int:
        """Evaluations after the lowest loss."""
        best = self.best
        if best is None:
            return len(self.losses)
        later = [step for step in self.losses if step > best.step]
        return len(later)

    @property
    def is_exhausted(self) -> bool:
        """Whether training stops."""
        return 0 < self.patience <= self.num_since_best

    def add(self, step: int, loss: float) -> bool:
        """Add an evaluation; whether its loss is the lowest so far."""
        self.losses[step] = loss
        best = self.best
        return best is not None and best.step == step

    def forget_above(self, step: int) -> None:
        """Forget evaluations after later steps, which are trained again."""
        for later in [each for each in self.losses if each > step]:
            del self.losses[later]

    def stop_text(self, step: int) -> str:
        """Why training has stopped after a step."""
        best = self.best
        evaluations = counted(self.num_since_best, "evaluation")
        text = f"stopped early after step {step}: no lower loss in {evaluations}"
        if best is None:
            return text
        return f"{text}; the lowest was {best.loss:.4f} after step {best.step}"


def recorded_history(comm: Comm, run_folder: Path, *, start: int, patience: int) -> EvalHistory:
    """The evaluations that the events of a run record up to step `start`; every rank must call it."""
    losses: dict[int, float] = {}
    if comm.rank == 0 and start:
        losses = _recorded_losses(run_folder)
    pairs = [[step, loss] for step, loss in losses.items() if step <= start]
    # Of rank 0, since others may not have its folder, and all have to stop at the same evaluation.
    received = json.loads(broadcast_text(comm, json.dumps(pairs)))
    return EvalHistory(
        patience=patience, losses={int(step): float(loss) for step, loss in received}
    )


def go_back(run_folder: Path, *, start: int) -> None:
    """Forget a best checkpoint of a step after the first `start`, which is trained again: the lowest
    loss up to there whose checkpoint is left takes its place. One rank calls it.
    """
    best = recorded_best(run_folder)
    if best is None or best <= start:
        return
    saved = {step for step, _ in checkpoints(run_folder)}
    losses = _recorded_losses(run_folder)
    left = {step: loss for step, loss in losses.items() if step <= start and step in saved}
    now = EvalHistory(losses=left).best
    if now is None:
        forget_best(run_folder)
    else:
        write_best(run_folder, step=now.step, loss=now.loss)


def _recorded_losses(run_folder: Path) -> dict[int, float]:
    """Step -> loss of the evaluations in the events of a run, without those that a resume went back
    behind; the last one counts.
    """
    history = EvalHistory()
    try:
        for event in read_run_events(run_folder / EVENTS):
            if event["event"] in ("resume", "restart"):
                history.forget_above(event["step"])
            elif event["event"] == "eval" and isinstance(event.get("loss"), float):
                history.add(event["step"], event["loss"])
    except (UnreadableFile, ValueError):
        return history.losses  # no events yet, or damaged ones: the evaluations before count
    return history.losses
