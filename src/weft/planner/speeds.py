"""From counted work to seconds: efficiencies of a device, and times of kernels and collectives.

Note [Time of work]
    A kernel takes its floating-point operations at a share of the peak, plus its bytes at a share
    of the memory bandwidth, plus a launch. A collective takes what this rank sends in a ring at a
    share of the bandwidth of its slowest link, plus a latency for each of the ring's steps. The
    shares are few, and fitted (`planner/calibrate.py`) or assumed; a prediction says which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from weft.comm.observe import Operation
from weft.config.efficiency import Efficiency
from weft.config.hardware import GB, Hardware
from weft.planner.kernels import KernelLaunch

TERA = 1e12


@dataclass(frozen=True)
class Speeds:
    """Times of work on a device."""

    hardware: Hardware
    efficiency: Efficiency = field(default_factory=Efficiency)

    def kernel_s(self, kernel: KernelLaunch) -> float:
        """Seconds of one launch."""
        share = self.efficiency
        memory = self.hardware.hbm_tb_s * TERA * share.memory
        seconds = share.launch_s + kernel.num_bytes / memory
        if kernel.flops:
            reached = share.attention if kernel.kind == "attention" else share.gemm
            peak = self.hardware.tflops(kernel.dtype) * TERA
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
