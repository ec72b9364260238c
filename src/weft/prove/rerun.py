"""Owns the proof of a run that has been: its first steps again on one process, number by number against its journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.config.load import load
from weft.config.run import Run
from weft.config.schema import ParallelConfig, PipelineConfig
from weft.core.mesh import Mesh
from weft.data.dataset import open_data
from weft.errors import DataError, Fault
from weft.models import FAMILIES
from weft.train.build import build_feed, build_step
from weft.train.event_log import EVENTS, course, read_events
from weft.train.loop import step_events

BOUNDS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 4e-3, "float16": 5e-4}
"""Largest relative difference that rounding explains after some dozens of steps (16 bits: `DRIFT_AFTER`), by dtype of compute.

Float32 rounds at 6e-8; the loss sums thousands of terms in another order on every layout, and each step of AdamW starts
from the last one's differences. Measured on the default job: 1e-6 after 10 steps. A wrong reduction shows as 1e-2 or more
in the gradient norm of the first step. Of 16-bit types it is one rounding, eps / 2. Measured in the first 5 steps of the
default job on tp2: 3e-4 in bfloat16, 1e-5 in float16."""

DRIFT_AFTER = {"bfloat16": 5, "float16": 5}
"""Steps after which two orders of summation train two different models: the default job on tp2 differs from one process by
0.7 of the gradient norm within 20 steps, while its loss is 0.02 off. Those steps prove nothing, either way."""


@dataclass(frozen=True)
class StepPair:
    """The same step of the run and of one process."""

    step: int
    loss: float
    loss_alone: float
    norm: float
    norm_alone: float

    @property
    def loss_difference(self) -> float:
        """Relative to one process."""
        return abs(self.loss - self.loss_alone) / max(abs(self.loss_alone), 1e-30)

    @property
    def norm_difference(self) -> float:
        """Relative to one process."""
        return abs(self.norm - self.norm_alone) / max(abs(self.norm_alone), 1e-30)


def recorded_run(out: Path) -> Run:
    """The config that the first steps of the run in this folder were trained by, also where later ones had another.

    Raises:
        DataError: the folder holds no run.
    """
    for name in ("run.toml", EVENTS):
        if not (out / name).is_file():
            raise DataError(
                Fault("weft prove", "no run in this folder", f"{str(out)!r} without {name}", fix="name a run folder")
            )
    first = out / "run-1.toml"
    return load([str(first if first.is_file() else out / "run.toml")], FAMILIES)


def recorded_steps(out: Path) -> list[dict[str, Any]]:
    """The step events up to the first resume: what comes behind it may have another learning rate.

    Raises:
        DataError: the run began in another folder.
    """
    events = list(read_events(out / EVENTS))
    steps, resumed = course(events), [event["step"] for event in events if event["event"] == "resume" and event["step"]]
    if steps and steps[0]["step"] > 1:
        what = f"the run in {out} begins after step {steps[0]['step'] - 1}, from a checkpoint of another folder"
        raise DataError(Fault("weft prove", what, fix="prove the run that it goes on from"))
    return [step for step in steps if not resumed or step["step"] <= min(resumed)]


def on_one_process(run: Run) -> Run:
    """The same run on one rank: same model, data, batch and optimizer, nothing cut."""
    alone = {"mesh": "", "nproc": None, "parallel": ParallelConfig(), "pipeline": PipelineConfig()}
    return run.model_copy(update={**alone, "sample": 0, "out": None, "resume": None})


def rerun(out: Path, steps: int) -> Iterator[StepPair]:
    """Play the first `steps` steps of the run in `out` again on one process; yields each as it is done."""
    recorded = recorded_steps(out)
    alone = on_one_process(recorded_run(out))
    torch.set_flush_denormal(True)
    comm = Comm(Mesh.parse(""), 0, ThreadWorld(1).transport(0))
    samples = open_data(alone.data, alone.model)
    mine = step_events(alone, build_step(alone, comm), build_feed(alone, comm, samples))
    for theirs, ours in islice(zip(recorded, mine, strict=False), steps):
        yield StepPair(ours["step"], theirs["loss"], ours["loss"], theirs["grad_norm"], ours["grad_norm"])
