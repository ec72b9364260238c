"""From counted work to seconds: efficiencies of a device, and times of kernels and collectives.

Note [Time of work]
    A kernel takes its floating-point operations at a share of the peak, plus its bytes at a share
    of the memory bandwidth; but the host launches kernels one by one, so none takes less than a
    launch. Where both are alike a kernel takes a little more than either (a maximum with a rounded
    corner). A CPU is host and device at once: there the two add up. Of a matrix product with few
    outputs only some of the device's cores are busy: its share is `gemm` n / (n + `gemm_half`) for
    n outputs. Attention that is not fused also moves its scores. A collective takes what this rank
    sends in a ring at a share of the bandwidth of its slowest link, plus a latency for each of the
    ring's steps; an all-reduce between nodes at most those of a tree (NCCL has trees for that
    operation alone). A ring leaves a node once for each of its members there, so it has the network
    of all of them; an all-to-all goes straight to each member, and what is for other nodes leaves
    through the device's own share of the network. CPU ranks, equally many on each node, add up and
    gather in memory within nodes and then, at each place, between them (`comm/hosts_group.py`): of
    n members on k nodes a share (k - 1) / (n - 1) of a ring's bytes leaves the node, and the two
    parts follow each other. The constants are few, and fitted
    (`weft_plan/calibration/fit.py`) or assumed; a prediction says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from weft.comm.backends import policy_of
from weft.comm.observe import Operation
from weft.config.efficiency import Efficiency
from weft.config.hardware import GB, Hardware
from weft.core.node_placement import NodePlacement, goes_by_node
from weft.planner.measure.kernels import KernelBatch, KernelLaunch

TERA = 1e12

Link = Literal["node", "network"]


@dataclass(frozen=True)
class Speeds:
    """Times of work on a device, by its figures and its efficiency.

    Attributes:
        placement: of the ranks; None: each node has the ranks that the hardware says, in order.
    """

    hardware: Hardware
    placement: NodePlacement | None = None

    @property
    def efficiency(self) -> Efficiency:
        """What real work reaches on the device, fitted or assumed."""
        return self.hardware.efficiency

    @property
    def separates_reductions(self) -> bool:
        """Whether the second communicator of a group exists: only plans of groups have it (see Note
        [Communicators of a training run] in `comm/group.py`), and gloo connects without one.
        """
        return policy_of(self.hardware.device).connects_at_start

    def kernel_s(self, kernel: KernelLaunch) -> float:
        """Seconds of one launch, or of a batch of them."""
        if isinstance(kernel, KernelBatch):
            seconds = 0.0
            for part, count in kernel.parts:
                seconds += count * self.kernel_s(part)
            return seconds
        work_s = self._work_s(kernel)
        launch_s = self.efficiency.launch_s
        if self.hardware.device == "cpu":
            return work_s + launch_s
        return rounded_maximum(work_s, launch_s)

    def _work_s(self, kernel: KernelLaunch) -> float:
        """Seconds that work takes on the device alone."""
        share = self.efficiency
        memory = self.hardware.hbm_tb_s * TERA * share.memory
        seconds = kernel.num_bytes / memory
        if not kernel.flops:
            return seconds
        peak = self.hardware.tflops(kernel.dtype) * TERA
        if kernel.kind == "attention":
            attention_rate = peak * share.attention
            scores_s = scores_bytes(kernel, share) / memory
            seconds += scores_s
            return seconds + kernel.flops / attention_rate
        gemm_rate = peak * share.gemm
        few_outputs = 1 + share.gemm_half / outputs(kernel)
        return seconds + kernel.flops * few_outputs / gemm_rate

    def operation_s(self, op: Operation) -> float:
        """Seconds of one collective or message on this rank."""
        members = len(op.group)
        if members < 2:
            return 0.0
        num_nodes = self.num_nodes(op.group)
        transfer_s = self._transfer_s(op, num_nodes=num_nodes)
        latency_s = self._latency_s(op.op, members, num_nodes)
        return transfer_s + latency_s

    def num_nodes(self, group: Iterable[int]) -> int:
        """How many nodes these ranks are on."""
        if self.placement is not None:
            return self.placement.num_nodes(group)
        node = self.hardware.node
        return len({rank // node for rank in group})

    def link_of(self, group: Iterable[int]) -> Link:
        """The link that an operation of these ranks uses; see Note [Shared links] in
        `link_replay`."""
        return "node" if self.num_nodes(group) == 1 else "network"

    def _transfer_s(self, op: Operation, *, num_nodes: int) -> float:
        """Seconds in which what this rank sends is on its links."""
        members = len(op.group)
        if num_nodes == 1:
            return op.sent_bytes / self._link_rate(members)
        members_a_node = max(1, members // num_nodes)
        inside_s = op.sent_bytes / self._link_rate(members_a_node) if members_a_node > 1 else 0.0
        if op.op != "all_to_all" and goes_by_node(self.hardware.device, members, num_nodes):
            outside = (num_nodes - 1) / (members - 1)
            return outside * op.sent_bytes / self._network_rate + (1 - outside) * inside_s
        if op.op != "all_to_all":
            ring_rate = self._network_rate * members_a_node
            return max(inside_s, op.sent_bytes / ring_rate)
        num_outside = members - members_a_node
        outside = num_outside / (members - 1)
        outside_s = outside * op.sent_bytes / self._network_rate
        share_inside_s = (1 - outside) * inside_s
        return max(share_inside_s, outside_s)

    def _latency_s(self, op: str, members: int, num_nodes: int) -> float:
        """Seconds of the steps of a collective without their bytes: along a ring that crosses each
        node once; an all-reduce goes around twice, or up and down a tree of nodes.
        """
        inside_s = self.efficiency.latency_s
        between_s = self.efficiency.network_latency_s
        is_inside = num_nodes == 1
        if op in ("send", "recv"):
            return inside_s if is_inside else between_s
        if is_inside:
            ring_s = (members - 1) * inside_s
            return 2 * ring_s if op == "all_reduce" else ring_s
        if op == "all_to_all":
            rounds = math.ceil(math.log2(members))
            steps = min(members - 1, 2 * rounds)
            return steps * between_s
        num_inside = members - num_nodes
        num_between = num_nodes - 1
        ring_s = num_inside * inside_s + num_between * between_s
        if op != "all_reduce":
            return ring_s
        depth = math.ceil(math.log2(num_nodes))
        in_node = math.ceil(members / num_nodes) - 1
        tree_s = in_node * inside_s + depth * between_s
        return 2 * min(ring_s, tree_s)

    def message_s(self, num_bytes: int, sender: int, receiver: int) -> float:
        """Seconds of one message between two ranks."""
        share = self.efficiency
        if self.link_of((sender, receiver)) == "node":
            return num_bytes / self._link_rate(2) + share.latency_s
        return num_bytes / self._network_rate + share.network_latency_s

    def _link_rate(self, members: int) -> float:
        """Bytes a second of one device to so many members of its node, itself among them."""
        return self.hardware.link_gb_s_of(members) * GB * self.efficiency.link

    @property
    def _network_rate(self) -> float:
        """Bytes a second of one device between nodes."""
        return self.hardware.network_gb_s * GB * self.efficiency.network


def rounded_maximum(a: float, b: float) -> float:
    """The larger one; 1.19 times as much where both are equal."""
    larger = max(a, b)
    if not larger:
        return 0.0
    share = min(a, b) / larger
    corner: float = (1.0 + share**CORNER) ** (1.0 / CORNER)
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
    flops_of_a_product = 2 * head_size * scores
    products = kernel.flops / flops_of_a_product
    is_backward = products > FORWARD_PRODUCTS
    passes = BACKWARD_SCORES if is_backward else 1.0
    return scores * share.score_bytes * passes


FORWARD_PRODUCTS = 2.0
"""Matrix products of the forward of attention; the masked backward does 2.5."""
BACKWARD_SCORES = 2.5
"""Traffic of scores in the backward, of that in the forward: three products read or write them."""
