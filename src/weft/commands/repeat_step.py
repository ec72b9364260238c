"""Train up to one step of a recorded run again and compare that step with the recorded one. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comm.comm import Comm
from weft.config.run import Run
from weft.config.schema import GuardConfig
from weft.data.dataset import open_data
from weft.prove.rerun import BOUNDS, DRIFT_AFTER
from weft.prove.trace import relative_difference
from weft.run.run_ranks import run_ranks
from weft.train.build import build_data_loader, build_step_range, start_of
from weft.train.guard import FailedStep, StepGuard, samples_text
from weft.train.guard_records import GuardState, StepToRepeat

TIMEOUT_S = 24 * 3600.0


@dataclass(frozen=True)
class RepeatedStep:
    """The result of the repeated step.

    Attributes:
        failed: why a guard would not accept it; None if it is finite.
        samples: numbers of its samples.
        places: where the first of them are in their sources.
    """

    loss: float
    grad_norm: float
    failed: FailedStep | None
    samples: tuple[int, ...]
    places: tuple[dict[str, Any], ...]

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Repetition:
    """Yields lines to print; `is_equal` says at the end whether the step was repeated."""

    def __init__(self, folder: Path, run: Run, step: StepToRepeat) -> None:
        self.folder = folder
        self.run = run
        self.step = step
        self.is_equal = False

    def lines(self) -> Iterator[str]:
        """Repeat the step, and compare it with the record."""
        step, mesh = self.step, self.run.device_mesh
        where = f"on {mesh}, ranks as threads" if mesh.size > 1 else "on one device"
        yield f"{self.folder}: step {step.number} repeated {where}, from {self._start_text()}"
        repeated = repeat_step(self.run, step)
        yield f"  loss           {repeated.loss:.8g}  recorded {_recorded(step.loss)}"
        yield f"  gradient norm  {repeated.grad_norm:.8g}  recorded {_recorded(step.grad_norm)}"
        yield f"  samples        {samples_text(repeated.samples).partition(' ')[2]}"
        if repeated.failed is not None:
            yield f"  {repeated.failed.reason}; {samples_text(repeated.failed.suspects)}"
        for place in repeated.places:
            yield "  " + ", ".join(f"{key} {_value_text(value)}" for key, value in place.items())
        yield self._verdict(repeated)

    def _start_text(self) -> str:
        step = self.step
        source = str(step.checkpoint) if step.checkpoint else "the initial parameters"
        first, last = step.num_done + 1, step.number - 1
        if first > last:
            return source
        between = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{source} ({between} first)"

    def _verdict(self, repeated: RepeatedStep) -> str:
        step, dtype = self.step, self.run.precision.compute
        if step.loss is None or step.grad_norm is None:
            return "the run has no result of this step to compare with"
        is_recorded_finite = math.isfinite(step.loss) and math.isfinite(step.grad_norm)
        if not is_recorded_finite:
            self.is_equal = not repeated.is_finite
            if self.is_equal:
                return "not finite here either"
            return "finite here: the recorded layout, or the hardware, made it not finite"
        loss = relative_difference(step.loss, repeated.loss)
        norm = relative_difference(step.grad_norm, repeated.grad_norm)
        differences = f"relative difference: loss {loss:.1e}, gradient norm {norm:.1e}"
        num_repeated = step.number - step.num_done
        if num_repeated > DRIFT_AFTER.get(dtype, num_repeated):
            self.is_equal = repeated.is_finite
            limit = DRIFT_AFTER[dtype]
            return f"{differences}; after {limit} steps in {dtype} two orders of summation differ"
        bound = BOUNDS[dtype]
        self.is_equal = max(loss, norm) <= bound
        word = "equal" if self.is_equal else "NOT equal"
        return f"{differences}; {word} within {bound:.0e} ({dtype} rounding)"


def repeat_step(run: Run, step: StepToRepeat) -> RepeatedStep:
    """Train from the checkpoint to the step on `run.mesh`, ranks as threads."""
    resume = str(step.checkpoint) if step.checkpoint else None
    run = run.with_values({"resume": resume})

    def rank(comm: Comm) -> RepeatedStep:
        return _repeat_on_rank(run, step, comm)

    return run_ranks(run.device_mesh, rank, timeout_s=TIMEOUT_S)[0]


def _repeat_on_rank(run: Run, step: StepToRepeat, comm: Comm) -> RepeatedStep:
    samples = open_data(run.data, run.model)
    start = start_of(run, comm, samples)
    loader = build_data_loader(
        samples,
        comm,
        run.batch,
        seed=run.seed,
        later=run.model.reads_later_targets,
    )
    step_range = build_step_range(run.optim, total=run.steps, prefetch=0)
    learning_rate = step_range.learning_rate
    state = GuardState(skipped_batches=step.skipped_batches)
    guard = StepGuard(GuardConfig(nonfinite="skip"), loader, comm.mesh, state=state)
    for index in range(step.num_done, step.number):
        number = index + 1
        is_last = number == step.number
        if number in step.not_updated and not is_last:
            continue
        lr = step.lrs.get(number)
        report = start.step(
            loader.batches(guard.batch_of(index)),
            lr=learning_rate(index) if lr is None else lr,
            on_nonfinite="skip",
        )
    chosen = guard.samples_of(step.number)
    failed = guard.judge(step.number, report)
    named = chosen if failed is None else failed.suspects
    places = tuple(samples.place(sample) for sample in named[:3])
    return RepeatedStep(
        report.loss,
        report.grad_norm,
        failed,
        chosen,
        places,
    )


def _recorded(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.8g}"


def _value_text(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return str(value)
