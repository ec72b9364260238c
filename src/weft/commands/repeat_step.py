"""Train up to one step of a recorded run again and compare that step with the recorded one. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comm.comm import Comm
from weft.config.schema import GuardConfig
from weft.core.mesh import Mesh
from weft.prove.losses import relative_difference
from weft.run.run_ranks import run_ranks
from weft.train.build import RunSteps
from weft.train.guard import FailedStep, StepGuard, samples_text
from weft.train.guard_records import GuardState, StepToRepeat

BOUNDS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 4e-3, "float16": 5e-4}
"""Largest relative difference that rounding explains after some dozens of steps (16 bits:
`DRIFT_AFTER`), by compute dtype.

Float32 rounds at 6e-8; the loss sums thousands of terms in another order on every layout, and each
step of AdamW starts from the last one's differences. Measured on the default job: 1e-6 after 10
steps. A wrong reduction shows as 1e-2 or more in the gradient norm of the first step. Of 16-bit
types it is one rounding, eps / 2. Measured in the first 5 steps of the default job on tp2: 3e-4 in
bfloat16, 1e-5 in float16."""

DRIFT_AFTER = {"bfloat16": 5, "float16": 5}
"""Steps after which two orders of summation train two different models: the default job on tp2
differs from one process by 0.7 of the gradient norm within 20 steps, while its loss is 0.02 off.
Those steps prove nothing, either way."""
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


@dataclass(frozen=True)
class RepeatLayout:
    """How the steps of the run are trained again.

    Attributes:
        mesh: of ranks as threads.
        dtype: of activations and matrix products.
        build: the steps of the run on one rank, from the state that the repeated steps start from.
    """

    mesh: Mesh
    dtype: str
    build: Callable[[Comm], RunSteps]


class Repetition:
    """Yields lines to print; `is_equal` says at the end whether the step was repeated."""

    def __init__(self, folder: Path, step: StepToRepeat, *, layout: RepeatLayout) -> None:
        self.folder = folder
        self.layout = layout
        self.step = step
        self.is_equal = False

    def lines(self) -> Iterator[str]:
        """Repeat the step, and compare it with the record."""
        step = self.step
        mesh = self.layout.mesh
        if mesh.size > 1:
            where = f"on {mesh}, ranks as threads"
        else:
            where = "on one device"
        yield f"{self.folder}: step {step.number} repeated {where}, from {self._start_text()}"
        repeated = repeat_step(self.layout, step)
        yield f"  loss           {repeated.loss:.8g}  recorded {_recorded(step.loss)}"
        yield f"  gradient norm  {repeated.grad_norm:.8g}  recorded {_recorded(step.grad_norm)}"
        yield f"  samples        {samples_text(repeated.samples).partition(' ')[2]}"
        if repeated.failed is not None:
            yield f"  {repeated.failed.reason}; {samples_text(repeated.failed.suspects)}"
        for place in repeated.places:
            facts = [f"{key} {_value_text(value)}" for key, value in place.items()]
            yield f"  {', '.join(facts)}"
        yield self._verdict(repeated)

    def _start_text(self) -> str:
        step = self.step
        source = str(step.checkpoint) if step.checkpoint else "the initial parameters"
        first = step.num_done + 1
        last = step.number - 1
        if first > last:
            return source
        if first == last:
            between = f"step {first}"
        else:
            between = f"steps {first} to {last}"
        return f"{source} ({between} first)"

    def _verdict(self, repeated: RepeatedStep) -> str:
        step = self.step
        dtype = self.layout.dtype
        if step.loss is None or step.grad_norm is None:
            return "the run has no result of this step to compare with"
        is_recorded_finite = math.isfinite(step.loss) and math.isfinite(step.grad_norm)
        if not is_recorded_finite:
            self.is_equal = not repeated.is_finite
            if self.is_equal:
                return "not finite here either"
            reasons = "the recorded layout, or the hardware, made it not finite"
            if step.has_started_again:
                reasons = f"a key that the run.toml of a later start changed, {reasons}"
            return f"finite here: {reasons}"
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


def repeat_step(layout: RepeatLayout, step: StepToRepeat) -> RepeatedStep:
    """Train from the checkpoint to the step, ranks as threads."""

    def rank(comm: Comm) -> RepeatedStep:
        return _repeat_on_rank(layout.build(comm), step)

    return run_ranks(layout.mesh, rank, timeout_s=TIMEOUT_S)[0]


def _repeat_on_rank(steps: RunSteps, step: StepToRepeat) -> RepeatedStep:
    loader = steps.loader
    learning_rate = steps.step_range.learning_rate
    state = GuardState(skipped_batches=step.skipped_batches)
    guard = StepGuard(
        GuardConfig(nonfinite="skip"), loader, steps.step.model.comm.mesh, state=state
    )
    for index in range(step.num_done, step.number):
        number = index + 1
        is_last = number == step.number
        if number in step.not_updated and not is_last:
            continue
        lr = step.lrs.get(number)
        report = steps.step(
            loader.batches(guard.batch_of(index)),
            lr=learning_rate(index) if lr is None else lr,
            on_nonfinite="skip",
        )
    chosen = guard.samples_of(step.number)
    failed = guard.judge(step.number, report)
    named = chosen if failed is None else failed.suspects
    places = tuple(steps.samples.place(sample) for sample in named[:3])
    return RepeatedStep(
        loss=report.loss, grad_norm=report.grad_norm, failed=failed, samples=chosen, places=places
    )


def _recorded(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:.8g}"


def _value_text(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return str(value)
