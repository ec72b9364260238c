"""From counted work to seconds: efficiencies of a device, and times of kernels and collectives.

Note [Time of work]
    A kernel takes its floating-point operations at a share of the peak, plus its bytes at a share
    of the memory bandwidth, plus a launch. A collective takes what this rank sends in a ring at a
    share of the bandwidth of its slowest link, plus a latency for each of the ring's steps. The
    shares are few, and fitted (`planner/calibrate.py`) or assumed; a prediction says which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.comm.observe import Operation
from weft.config.hardware import GB, Hardware
from weft.core.interval import Interval
from weft.planner.kernels import KernelLaunch

TERA = 1e12
PEAK_SHARE = {"bfloat16": 1.0, "float16": 1.0, "float32": 0.5, "float64": 1 / 16}
"""Peak of matrix products by dtype, as a share of bfloat16; float32 in TF32."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the published figures that real work reaches, and fixed costs.

    Attributes:
        gemm, attention: of the peak.
        memory: of the memory bandwidth.
        launch_s: seconds that each kernel adds.
        link, network: of the bandwidth inside and between nodes.
        latency_s: of each step of a ring.
        source: "assumed", or what they were fitted to.
        low, high: measured seconds as shares of predicted ones: the range of 80% of them.
    """

    gemm: float = 0.75
    attention: float = 0.5
    memory: float = 0.8
    launch_s: float = 2e-6
    link: float = 0.8
    network: float = 0.8
    latency_s: float = 5e-6
    source: str = "assumed"
    low: float = 0.6
    high: float = 1.5

    def interval(self, seconds: float) -> Interval:
        """The range of a predicted time."""
        return Interval(seconds * self.low, seconds, seconds * self.high)


@dataclass(frozen=True)
class Speeds:
    """Times of work on a device."""

    hardware: Hardware
    efficiency: Efficiency = Efficiency()

    def kernel_s(self, kernel: KernelLaunch) -> float:
        """Seconds of one launch."""
        share = self.efficiency
        memory = self.hardware.hbm_tb_s * TERA * share.memory
        seconds = share.launch_s + kernel.num_bytes / memory
        if kernel.flops:
            reached = share.attention if kernel.kind == "attention" else share.gemm
            peak = self.hardware.bf16_tflops * TERA * PEAK_SHARE.get(kernel.dtype, 1.0)
            seconds += kernel.flops / (peak * reached)
        return seconds

    def operation_s(self, op: Operation) -> float:
        """Seconds of one collective or message on this rank."""
        members = len(op.group)
        if members < 2:
            return 0.0
        nodes = {rank // self.hardware.node for rank in op.group}
        share = self.efficiency
        bandwidth = self.hardware.link_gb_s * GB * share.link
        if len(nodes) > 1:
            members_a_node = max(1, members // len(nodes))
            network = self.hardware.network_gb_s * GB * share.network * members_a_node
            bandwidth = min(bandwidth, network)
        steps = 1 if op.op in ("send", "recv") else members - 1
        if op.op == "all_reduce":
            steps = 2 * steps
        tree_steps = 2 * math.ceil(math.log2(members))
        return op.sent_bytes / bandwidth + min(steps, tree_steps) * share.latency_s

    def message_s(self, num_bytes: int, sender: int, receiver: int) -> float:
        """Seconds of one message between two ranks."""
        share = self.efficiency
        is_inside = sender // self.hardware.node == receiver // self.hardware.node
        bandwidth = self.hardware.network_gb_s * GB * share.network
        if is_inside:
            bandwidth = self.hardware.link_gb_s * GB * share.link
        return num_bytes / bandwidth + share.latency_s
