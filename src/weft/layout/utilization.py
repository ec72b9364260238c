"""Model FLOPs utilization (MFU): a step's model FLOPs as a share of what the devices could do. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.layout.plan import Plan

TERA = 10**12
FORWARDS = 3
"""Forwards that a step counts as: a backward takes two; recomputation does not count."""


@dataclass(frozen=True)
class AdapterFlops:
    """Forward FLOPs of one sequence in a run that trains adapters alone; zeros: it trains all.

    Attributes:
        frozen: of products with frozen weights, whose gradients are not computed: such a product
            counts as two forwards.
        adapters: of the adapters, which the blocks of a plan do not count.
    """

    frozen: float = 0.0
    adapters: float = 0.0


ALL_TRAINED = AdapterFlops()


def model_flops(plan: Plan, adapted: AdapterFlops = ALL_TRAINED) -> float:
    """Floating-point operations of a step that the model needs, on all ranks."""
    forward = sum(stage.flops for stage in plan.stages) + adapted.adapters
    return plan.global_size * (FORWARDS * forward - adapted.frozen)


@dataclass(frozen=True)
class Utilization:
    """MFU of the steps of a run.

    Attributes:
        flops: `model_flops` of a step.
        num_devices: one a rank.
        peak_tflops: of a device: dense bfloat16 matrix products.
        has_frozen: whether some products are with frozen weights.
    """

    flops: float
    num_devices: int
    peak_tflops: float
    has_frozen: bool = False

    @classmethod
    def of(
        cls, plan: Plan, *, peak_tflops: float, adapted: AdapterFlops = ALL_TRAINED
    ) -> Utilization:
        """The utilization of devices by the steps of a plan."""
        flops = model_flops(plan, adapted)
        return cls(flops, plan.mesh.size, peak_tflops, has_frozen=adapted.frozen > 0)

    def mfu(self, step_s: float) -> float:
        """The share of the peak that a step of so many seconds reaches."""
        return self.flops / step_s / (self.num_devices * self.peak_tflops * TERA)

    @property
    def text(self) -> str:
        """The formula and the peak, for the reader."""
        frozen = ", two of frozen weights" if self.has_frozen else ""
        peak = f"{self.peak_tflops:g} TFLOP/s a device"
        return f"{FORWARDS} forwards of model FLOPs{frozen}, of {peak}"
