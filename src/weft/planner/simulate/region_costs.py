"""Work of a recorded region in seconds: kernels between operations, and operations with their lane and link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.comm.observe import Operation
from weft.core.dimension import pipeline_axis
from weft.planner.measure.kernels import KernelLaunch
from weft.planner.measure.recorder import Ended, RecordedRegion, Started
from weft.planner.simulate.speeds import Link, Speeds


class CommOp(NamedTuple):
    """A collective or message of a rank.

    Attributes:
        axis: mesh axis, or several joined by "+".
        lane: its communicator.
        seconds: alone on its link.
    """

    name: str
    axis: str
    lane: str
    link: Link
    seconds: float


class Compute(NamedTuple):
    """Kernels, one after another."""

    seconds: float


class Start(NamedTuple):
    """The rank starts the operation of this number in its region."""

    number: int


class WaitForOwn(NamedTuple):
    """The rank waits for an operation that it started in this region."""

    number: int


class WaitForCarried(NamedTuple):
    """The rank waits for the oldest operation of a lane that an earlier region started and that has
    not been waited for.
    """

    lane: str


RegionStep = Compute | Start | WaitForOwn | WaitForCarried


@dataclass(frozen=True)
class RegionCosts:
    """A region with its work in seconds.

    Attributes:
        steps: in order; kernels without an operation between them are one step.
        ops: that it starts.
        compute: seconds of its kernels.
        links: that its operations use.
        before_first_op: seconds of the kernels before its first operation.
        overlap_slowdown: see Note [Lanes] in `region_time`.
    """

    steps: tuple[RegionStep, ...]
    ops: tuple[CommOp, ...]
    compute: float
    links: frozenset[Link]
    before_first_op: float
    overlap_slowdown: float = 0.0


class CostTable:
    """Seconds of kernels and operations on a device, each computed once."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self._kernels: dict[KernelLaunch, float] = {}
        self._regions: dict[tuple[int, float], tuple[RecordedRegion, RegionCosts]] = {}

    def kernel_s(self, kernel: KernelLaunch) -> float:
        """Seconds of one launch of a kernel."""
        seconds = self._kernels.get(kernel)
        if seconds is None:
            seconds = self.speeds.kernel_s(kernel)
            self._kernels[kernel] = seconds
        return seconds

    def operation(self, op: Operation) -> CommOp:
        """An operation with its lane, link and seconds."""
        return CommOp(
            name=op.op,
            axis=op.axis,
            lane=self._lane(op),
            link=self.speeds.link_of(op.group),
            seconds=self.speeds.operation_s(op),
        )

    def _lane(self, op: Operation) -> str:
        """The communicator that carries an operation; see Note [Lanes] in `region_time`."""
        if op.is_p2p:
            return f"{op.axis} {op.op}"
        if op.communicator == "group" or not self.speeds.separates_reductions:
            return op.axis
        return f"{op.axis} {op.communicator}"

    def region(self, region: RecordedRegion, *, slow: float = 1.0) -> RegionCosts:
        """The region with its work in seconds; its kernels take `slow` times as long."""
        key = (id(region), slow)
        known = self._regions.get(key)
        if known is None:
            costs = _RegionSteps(self, slow).of(region)
            known = region, costs
            self._regions[key] = known
        return known[1]


class _RegionSteps:
    """The steps of a region, from its events in order.

    Args:
        slow: factor of the kernels.
    """

    def __init__(self, table: CostTable, slow: float) -> None:
        self.table = table
        self.slow = slow
        self.steps: list[RegionStep] = []
        self.ops: list[CommOp] = []
        self.numbers: dict[int, int] = {}
        self.computed = 0.0
        self.total = 0.0
        self.before_first_op: float | None = None

    def of(self, region: RecordedRegion) -> RegionCosts:
        """The costs of the whole region."""
        for event in region.events:
            if isinstance(event, KernelLaunch):
                self.computed += self.slow * self.table.kernel_s(event)
            elif isinstance(event, Started):
                self._add_start(event.op)
            else:
                self._add_wait(event)
        self._end_kernels()
        before_first_op = self.before_first_op
        return RegionCosts(
            steps=tuple(self.steps),
            ops=tuple(self.ops),
            compute=self.total,
            links=frozenset(op.link for op in self.ops),
            before_first_op=self.total if before_first_op is None else before_first_op,
            overlap_slowdown=self.table.speeds.efficiency.overlap_slowdown,
        )

    def _end_kernels(self) -> None:
        """Kernels so far are one step."""
        if self.computed:
            self.steps.append(Compute(self.computed))
            self.total += self.computed
            self.computed = 0.0

    def _add_start(self, op: Operation) -> None:
        self._end_kernels()
        if self.before_first_op is None:
            self.before_first_op = self.total
        number = len(self.ops)
        self.numbers[id(op)] = number
        self.steps.append(Start(number))
        self.ops.append(self.table.operation(op))

    def _add_wait(self, event: Ended) -> None:
        op = event.op
        number = self.numbers.get(id(op))
        if number is not None:
            self._end_kernels()
            self.steps.append(WaitForOwn(number))
        elif op.axis != pipeline_axis():  # the schedule has messages between stages
            self._end_kernels()
            lane = self.table.operation(op).lane
            self.steps.append(WaitForCarried(lane))
