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
        gemm, attention: of the peak.
        memory: of the memory bandwidth.
        launch_s: seconds that each kernel adds.
        link, network: of the bandwidth inside and between nodes.
        latency_s: of each step of a ring.
        source: "assumed", or what they were fitted to.
        low, high: measured seconds as shares of predicted ones: the range of 80% of them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    gemm: Above0 = 0.75
    attention: Above0 = 0.5
    memory: Above0 = 0.8
    launch_s: AtLeast0 = 2e-6
    link: Above0 = 0.8
    network: Above0 = 0.8
    latency_s: AtLeast0 = 5e-6
    source: str = "assumed"
    low: Above0 = 0.6
    high: Above0 = 1.5

    def interval(self, seconds: float) -> Interval:
        """The range of a predicted time."""
        return Interval(seconds * self.low, seconds, seconds * self.high)
