"""From counted work to seconds: efficiencies of a device, and times of kernels and collectives.

Note [Time of work]
    A kernel takes its floating-point operations at a share of the peak, plus its bytes at a share
    of the memory bandwidth; but the host launches kernels one by one, so none takes less than a
    launch. Where both are alike a kernel takes a little more than either (a maximum with a rounded
    corner). Of a matrix product with few outputs only some of the device's cores are busy: its
    share is `gemm` n / (n + `gemm_half`) for n outputs. Attention that is not fused also moves its
    scores. A collective takes what this rank sends in a ring at a share of the bandwidth of its
    slowest link, plus a latency for each of the ring's steps; between nodes at most those of a
    tree. A ring leaves a node once for each of its members there, so it has the network of all of
    them; an all-to-all goes straight to each member, and what is for other nodes leaves through the
    device's own share of the network. The constants are few, and fitted (`planner/calibrate.py`) or assumed; a prediction says
    which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.comm.observe import Operation
from weft.config.efficiency import Efficiency
from weft.config.hardware import GB, Hardware
from weft.planner.kernels import KernelBatch, KernelLaunch

TERA = 1e12


@dataclass(frozen=True)
class Speeds:
    """Times of work on a device, by its figures and its efficiency."""

    hardware: Hardware

    @property
    def efficiency(self) -> Efficiency:
        """What real work reaches on the device, fitted or assumed."""
        return self.hardware.efficiency

    def kernel_s(self, kernel: KernelLaunch) -> float:
        """Seconds of one launch, or of a batch of them."""
        if isinstance(kernel, KernelBatch):
            return sum(count * self.kernel_s(part) for part, count in kernel.parts)
        return rounded_maximum(self._work_s(kernel), self.efficiency.launch_s)

    def _work_s(self, kernel: KernelLaunch) -> float:
        """Seconds on the device alone."""
        share = self.efficiency
        memory = self.hardware.hbm_tb_s * TERA * share.memory
        seconds = kernel.num_bytes / memory
        if not kernel.flops:
            return seconds
        peak = self.hardware.tflops(kernel.dtype) * TERA
        if kernel.kind == "attention":
            seconds += scores_bytes(kernel, share) / memory
            return seconds + kernel.flops / (peak * share.attention)
        few_outputs = 1 + share.gemm_half / outputs(kernel)
        return seconds + kernel.flops * few_outputs / (peak * share.gemm)

    def operation_s(self, op: Operation) -> float:
        """Seconds of one collective or message on this rank."""
        members = len(op.group)
        if members < 2:
            return 0.0
        nodes = {rank // self.hardware.node for rank in op.group}
        share = self.efficiency
        latency_s = share.latency_s if len(nodes) == 1 else share.network_latency_s
        steps = 1 if op.op in ("send", "recv") else members - 1
        if op.op == "all_reduce":
            steps = 2 * steps
        if len(nodes) > 1:
            steps = min(steps, 2 * math.ceil(math.log2(members)))
        return self._transfer_s(op, num_nodes=len(nodes)) + steps * latency_s

    def _transfer_s(self, op: Operation, *, num_nodes: int) -> float:
        """Seconds in which what this rank sends is on its links."""
        inside_s = op.sent_bytes / (self.hardware.link_gb_s * GB * self.efficiency.link)
        if num_nodes == 1:
            return inside_s
        members = len(op.group)
        members_a_node = max(1, members // num_nodes)
        own_network = self.hardware.network_gb_s * GB * self.efficiency.network
        if op.op == "all_to_all":
            outside = (members - members_a_node) / (members - 1)
            outside_s = outside * op.sent_bytes / own_network
            return max((1 - outside) * inside_s, outside_s)
        return max(inside_s, op.sent_bytes / (own_network * members_a_node))

    def message_s(self, num_bytes: int, sender: int, receiver: int) -> float:
        """Seconds of one message between two ranks."""
        share = self.efficiency
        is_inside = sender // self.hardware.node == receiver // self.hardware.node
        if is_inside:
            bandwidth = self.hardware.link_gb_s * GB * share.link
            return num_bytes / bandwidth + share.latency_s
        bandwidth = self.hardware.network_gb_s * GB * share.network
        return num_bytes / bandwidth + share.network_latency_s


def rounded_maximum(a: float, b: float) -> float:
    """The larger one; 1.19 times as much where both are equal."""
    larger = max(a, b)
    if not larger:
        return 0.0
    corner: float = (1.0 + (min(a, b) / larger) ** CORNER) ** (1.0 / CORNER)
    return larger * corner


CORNER = 4
"""Power of the norm by which the time of a kernel follows from its work and its launch."""


def outputs(kernel: KernelLaunch) -> float:
    """Outputs of a matrix product; infinite for a convolution."""
    if not kernel.sizes:
        return math.inf
    batch, rows, columns, _ = kernel.sizes
    return max(1, batch * rows * columns)


def scores_bytes(kernel: KernelLaunch, share: Efficiency) -> float:
    """Bytes that attention moves besides its inputs and outputs, where it is not fused: of all
    scores, masked ones too.
    """
    if not (kernel.sizes and share.score_bytes):
        return 0.0
    heads, queries, keys, head_size = kernel.sizes
    scores = heads * queries * keys
    products = kernel.flops / (2 * head_size * scores)
    is_backward = products > FORWARD_PRODUCTS
    return scores * share.score_bytes * (BACKWARD_SCORES if is_backward else 1.0)


FORWARD_PRODUCTS = 2.0
"""Matrix products of the forward of attention; the masked backward does 2.5."""
BACKWARD_SCORES = 2.5
"""Traffic of scores in the backward, of that in the forward: three products read or write them."""
