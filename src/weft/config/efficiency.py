"""Shares of a device's figures that real work reaches, and fixed costs. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from weft.core.interval import Interval

Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Efficiency:
    """Shares of the published figures that real work reaches, and fixed costs.

    The table `[efficiency]` of a hardware file has these fields.

    Attributes:
        gemm: of the peak, by large matrix products.
        gemm_half: outputs (rows x columns x batch) of a product that reaches half of that.
        attention: of the peak.
        score_bytes: bytes that attention moves for each score, forward; 2.5 times in the backward.
            0: attention is fused.
        memory: of the memory bandwidth. Above 1 where kernels are fused that are counted apart.
        launch_s: seconds that the host takes for each kernel of a training step: none takes less; on
            a CPU, beside its work.
        link, network: of the bandwidth inside and between nodes.
        latency_s, network_latency_s: of each step of a ring inside a node, and between nodes.
        overlap_slowdown: seconds that kernels lose for each second of a collective beside them:
            0: they overlap fully, 1: not at all.
        source: "assumed", or what they were fitted to.
        low, high: measured seconds as shares of predicted ones: the range of 80% of them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    gemm: Above0 = 0.75
    gemm_half: AtLeast0 = 0.0
    attention: Above0 = 0.5
    score_bytes: AtLeast0 = 0.0
    memory: Above0 = 0.8
    launch_s: AtLeast0 = 2e-6
    link: Above0 = 0.8
    network: Above0 = 0.8
    latency_s: AtLeast0 = 5e-6
    network_latency_s: AtLeast0 = 5e-6
    overlap_slowdown: Annotated[float, Field(ge=0, le=1)] = 0.0
    source: str = "assumed"
    low: Above0 = 0.6
    high: Above0 = 1.5

    def interval(self, seconds: float) -> Interval:
        """The range of a predicted time."""
        return Interval(low=seconds * self.low, mid=seconds, high=seconds * self.high)
