"""Weights & Biases: one run there for each run folder, also over resumes. Project, entity, key and mode: WANDB_* variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from weft.track.tracker import PROJECT, TrackedRun

STEP = "step"
"""The axis of every series: W&B's own step may not fall, and that of a run does after a restart."""
EXIT_CODES = {"failed": 1, "interrupted": 130}


class WandbRun:
    """Logs to a run of W&B."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step."""
        self._run.log({STEP: step, **values})

    def text(self, step: int, kind: str, text: str) -> None:
        """A row of texts."""
        self._run.log({STEP: step, f"text/{kind}": text})

    def close(self, status: str) -> None:
        """Send what is pending."""
        if status:
            self._run.summary["status"] = status
        self._run.finish(exit_code=EXIT_CODES.get(status, 0))


def open_tracker(run: TrackedRun, *, first_step: int) -> WandbRun:
    """The run under the id of this run folder."""
    os.environ.setdefault("WANDB_SILENT", "true")  # without a key it is an error, not a question
    import wandb

    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.name,
        id=run.tracker_id("wandb"),
        resume="allow",
        dir=str(run.folder),
        config=dict(run.config),
        settings=wandb.Settings(console="off", silent=True),
    )
    opened.define_metric(STEP, hidden=True)
    opened.define_metric("*", step_metric=STEP)
    return WandbRun(opened)
