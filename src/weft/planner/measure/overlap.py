"""What the collectives and messages of a step are overlapped with: kernels between the start of each and the wait for it.

Note [Overlap without times]
    A collective that is waited for before another kernel is launched is exposed, on every device.
    One with kernels in between is hidden behind them as far as they last; it is named by the kind
    of action in which most of these kernels run. With times (`--hardware`) `step_time` says how
    much of it is hidden.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.comm.observe import Operation
from weft.comm.transport import Op
from weft.core.dimension import pipeline_axis
from weft.layout.plan import Plan
from weft.parallel.pipeline.player import MAX_SENDS
from weft.planner.measure.kernels import KernelLaunch
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.recorder import RecordedRegion, Started
from weft.planner.measure.step_memory import boundary_bytes
from weft.schedule.actions import Act, Table
from weft.schedule.lower import Instruction, Program, Recv, Send

EXPOSED = "exposed"
NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight grads"}
"""Kinds of actions, as what communication hides behind."""


@dataclass(frozen=True)
class Share:
    """Operations of a step with one kind of overlap."""

    operations: int
    payload_bytes: int


StepOverlap = dict[tuple[str, Op], dict[str, Share]]
"""By mesh axis (or several joined by "+") and operation: what is hidden behind which kind of action,
or "exposed".
"""


def step_overlap(step: RankStep, row: int) -> StepOverlap:
    """The overlap of everything that the rank at pipeline coordinate `row` sends in a step."""
    totals: StepOverlap = {}
    labels = _labels(step.regions)
    for key, times in step.times_of_key(row).items():
        _add_all(totals, step.actions[key].operations, labels, times)
    for region in step.phases.values():
        _add_all(totals, region.operations, labels, 1)
    for program in step.programs:
        _add_messages(totals, step.plan, program, row)
    return totals


@dataclass
class _Waiting:
    """An operation under way.

    Attributes:
        begun: kernels of the running region before its start.
        ran: kernels since its start, by the kind of earlier regions.
    """

    begun: int
    ran: Counter[str] = field(default_factory=Counter)

    def end_region(self, name: str, launched: int) -> None:
        """Count the kernels of a region since its start."""
        self.ran[name] += launched - self.begun
        self.begun = 0


def _labels(regions: Iterable[RecordedRegion]) -> dict[int, str]:
    """Identity of an operation -> its overlap."""
    labels: dict[int, str] = {}
    under_way: dict[int, _Waiting] = {}
    for region in regions:
        name = _region_label(region.name)
        launched = 0
        for event in region.events:
            if isinstance(event, KernelLaunch):
                launched += 1
                continue
            identity = id(event.op)
            if isinstance(event, Started):
                under_way[identity] = _Waiting(begun=launched)
            elif identity in under_way:
                ended = under_way.pop(identity)
                ended.end_region(name, launched)
                labels[identity] = _most(ended.ran)
        for waiting in under_way.values():
            waiting.end_region(name, launched)
    for identity, waiting in under_way.items():
        labels[identity] = _most(waiting.ran)
    return labels


def _most(ran: Counter[str]) -> str:
    """Where most of what ran did; "exposed" if nothing ran."""
    if not ran.total():
        return EXPOSED
    [(name, _)] = ran.most_common(1)
    return name


def _region_label(name: str) -> str:
    """`B3.0` -> backward; phases have their own names."""
    is_action = len(name) > 1 and name[0] in NAMES and name[1].isdigit()
    return NAMES[name[0]] if is_action else name


def _add_all(
    totals: StepOverlap, operations: Iterable[Operation], labels: Mapping[int, str], times: int
) -> None:
    for op in operations:
        key = (op.axis, op.op)
        share = Share(times, times * op.payload_bytes)
        _add(totals, key, labels[id(op)], share)


def _add(totals: StepOverlap, key: tuple[str, Op], label: str, share: Share) -> None:
    of_key = totals.setdefault(key, {})
    before = of_key.get(label, Share(0, 0))
    of_key[label] = Share(
        operations=before.operations + share.operations,
        payload_bytes=before.payload_bytes + share.payload_bytes,
    )


def _add_messages(totals: StepOverlap, plan: Plan, program: Program, row: int) -> None:
    """Messages between pipeline ranks: by the actions between their start and the wait."""
    instructions = program.rows[row]
    ends = _ends_of_messages(instructions, program.table)
    for index, transfer in enumerate(instructions):
        if isinstance(transfer, Act):
            continue
        actions: Counter[str] = Counter()
        for instruction in instructions[index : ends[index]]:
            if isinstance(instruction, Act):
                name = NAMES[instruction.kind]
                actions[name] += 1
        op: Op = "send" if isinstance(transfer, Send) else "recv"
        share = Share(1, boundary_bytes(plan, transfer))
        _add(totals, (pipeline_axis(), op), _most(actions), share)


def _ends_of_messages(instructions: Sequence[Instruction], table: Table) -> dict[int, int]:
    """Place of a send or receive -> place of the instruction that waits for it.

    A receive is waited for by the action that uses its tensor, a send when too many are under way,
    or at the end.
    """
    place_of_use = {}
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Act):
            source = table.source(instruction)
            place_of_use[source] = index
    ends: dict[int, int] = {}
    sends: deque[int] = deque()
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Recv):
            ends[index] = place_of_use[instruction.act]
        elif isinstance(instruction, Send):
            sends.append(index)
            if len(sends) > MAX_SENDS:
                oldest = sends.popleft()
                ends[oldest] = index
    for index in sends:
        ends[index] = len(instructions)
    return ends
