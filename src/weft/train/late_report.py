"""Steps whose numbers the host reads after it has launched the next one, so that the device never waits for the host.

Note [Reports one step late]
    On a GPU the host enqueues kernels ahead of the device. A step whose loss it reads before it
    enqueues the next one leaves the device idle for as long as that takes. So the numbers of a step
    are copied to the host behind its update, and read when the next step has been launched.
    The guard does not wait for them: a flag on the device says that some loss or gradient norm was
    not finite, and the kernel of the update leaves everything as it is while the flag is set. It
    stays set, so the parameters are those before the first such step until the host has seen it.
    Then the host drops what it has launched since and repeats that step, which computes the same
    bits, and waits for it: everything else is as without late reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.models.common.batch import Batch
from weft.parallel.zero import grad_norm
from weft.run.rank_status import Phase
from weft.train.optim import NamedOptimizer
from weft.train.step import ComputedStep, StepReport, TrainStep

LATE_DEVICES = frozenset({"cuda"})
"""Device types on which the host runs ahead."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the host has not waited for.

    Attributes:
        number: of the step, from 1.
        batches: this rank's micro-batches, for a repetition.
    """

    number: int
    batches: Sequence[Batch]
    lr: float
    computed: ComputedStep


def reports_late(step: TrainStep) -> bool:
    """Whether reports of a step may be late: its update can be left out on the device, and nothing
    on the host depends on its numbers. Steps of models that update buffers are waited for.
    """
    optimizer = step.optimizer
    return (
        step.model.comm.device.type in LATE_DEVICES
        and not step.loss_scale.is_dynamic
        and step.local_updates is None
        # The methods that update buffers are users' code, which no flag on the device leaves out.
        and not step.model.buffer_records.modules
        and isinstance(optimizer, NamedOptimizer)
        and optimizer.skips_on_device
    )


class LateReports:
    """Launches steps of a `TrainStep`; every rank makes the same calls."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._skip = torch.zeros((), dtype=torch.float32, device=step.model.comm.device)

    def launch(
        self,
        number: int,
        batches: Sequence[Batch],
        *,
        lr: float,
        status: Callable[[], int],
        on_phase: Callable[[Phase], None] | None,
    ) -> LaunchedStep:
        """Launch a step with its update, which happens on the device if every loss and norm since
        `forget` is finite. The arguments are those of `TrainStep`.
        """
        step = self.step
        computed = step.compute(batches, status=status, on_phase=on_phase)
        if on_phase is not None:
            on_phase("update")
        pending = computed.totals
        # Never lowered here: later steps compute with parameters that lack this update.
        self._skip = torch.maximum(self._skip, pending.is_not_finite)
        grad_norm.clip(
            step.grads,
            pending.grad_norm_tensor / computed.scale,
            most=step.clip,
            scale=computed.scale,
        )
        step.update(lr, skip=self._skip)
        step.grads.after_optimizer_step()
        # Behind the update in the stream, so that the numbers arrive when it is done.
        pending.start_reading()
        return LaunchedStep(number, batches, lr, computed)

    def read(self, launched: LaunchedStep) -> StepReport | None:
        """Wait for the numbers of a step; None if it is to be repeated: it is not finite."""
        computed = launched.computed
        totals = computed.totals.read()
        if not (math.isfinite(totals.loss) and math.isfinite(totals.grad_norm)):
            return None
        return StepReport(
            loss=totals.loss,
            grad_norm=totals.grad_norm / computed.scale,
            targets=totals.targets,
            step_s=time.perf_counter() - computed.start_s,
            mem_bytes=totals.mem_bytes,
            loss_scale=computed.scale,
            expert_load=totals.expert_load,
            status=totals.status,
            rewards=totals.rewards,
        )

    def forget(self) -> None:
        """Updates happen again, from the next step on."""
        self._skip = torch.zeros_like(self._skip)
