"""Model FLOPs utilization (MFU): a step's model FLOPs as a share of what the devices could do. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.layout.plan import Plan

TERA = 10**12
FORWARDS = 3
"""Forwards that a step counts as: a backward takes two; recomputation does not count."""


def model_flops(plan: Plan) -> float:
    """Floating-point operations of a step that the model needs, on all ranks."""
    flops_of_sequence = sum(stage.flops for stage in plan.stages)
    return FORWARDS * plan.global_size * flops_of_sequence


@dataclass(frozen=True)
class Utilization:
    """MFU of the steps of a run.

    Attributes:
        flops: `model_flops` of a step.
        num_devices: one a rank.
        peak_tflops: of a device: dense bfloat16 matrix products.
    """

    flops: float
    num_devices: int
    peak_tflops: float

    @classmethod
    def of(cls, plan: Plan, *, peak_tflops: float) -> Utilization:
        """Of the steps of a plan."""
        return cls(model_flops(plan), plan.mesh.size, peak_tflops)

    def mfu(self, step_s: float) -> float:
        """The share of the peak that a step of so many seconds reaches."""
        return self.flops / step_s / (self.num_devices * self.peak_tflops * TERA)

    @property
    def text(self) -> str:
        """The formula and the peak, for the reader."""
        return f"{FORWARDS} forwards of model FLOPs, of {self.peak_tflops:g} TFLOP/s a device"
