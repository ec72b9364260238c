"""Plans of injected faults: which fault, in which phase and step, on which rank. Pure: seeded, no torch.

A plan covers every pair (kind, phase) that makes sense as evenly as its size allows; its faults are far
enough apart that the ranks have recovered from one before the next.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from weft.run.rank_status import PHASES, Phase

FaultKind = Literal[
    "kill",
    "kill_two",
    "exit",
    "stop",
    "segfault",
    "exception",
    "out_of_memory",
    "full_disk",
    "full_disk_at_end",
    "lost_folder",
    "replaced_data",
    "slow_disk",
    "lost_link",
    "slow_link",
    "corrupted_message",
    "corrupted_file",
    "clock",
    "pause",
    "stopped_launcher",
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
TOLERATED_KINDS: tuple[FaultKind, ...] = (
    "full_disk",
    "full_disk_at_end",
    "slow_disk",
    "slow_link",
    "clock",
    "pause",
    "stopped_launcher",
)
"""Faults after which the ranks go on; after the others they are started again."""
FAULT_PHASES: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase != "exchange")
"""Phases in which faults are injected: those that every layout has."""
MESSAGE_PHASES: tuple[Phase, ...] = ("backward", "reduce")
"""Where gradients are reduced: the messages in which a flipped bit is promised to be found."""
PHASES_OF_KIND: dict[FaultKind, tuple[Phase, ...]] = {
    "corrupted_message": MESSAGE_PHASES,
    "full_disk_at_end": ("save",),
}
"""Kinds that make sense in some phases only."""

FIRST_STEP = 4
STEP_GAP = 4
"""Steps between two faults; snapshots and evaluations divide it."""
STEPS_AFTER = 10
"""Steps after the last fault, in which the disk is no longer full."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault that a plan injects.

    Attributes:
        number: place in the order of the run's faults, from 0.
        step: it happens in the first phase of its kind at this step or later; 0: in a start, or at
            the end of the run.
    """

    number: int
    kind: FaultKind
    phase: Phase
    rank: int
    step: int

    @property
    def ends_rank(self) -> bool:
        """Whether ranks are started again after it."""
        return self.kind not in TOLERATED_KINDS


@dataclass(frozen=True)
class FaultPlan:
    """The faults of one run.

    Attributes:
        ledger: file to which ranks append what they have injected, and when they start and resume.
        run_folder: holds the checkpoints, for corrupted files.
        reduced_axes: axes over which messages are corrupted.
        source: file of the training data, which is replaced; None: it is left alone.
    """

    faults: tuple[PlannedFault, ...]
    ledger: Path
    run_folder: Path
    reduced_axes: tuple[str, ...]
    source: Path | None = None

    def first_step(self, fault: PlannedFault) -> int:
        """The step from which on a fault happens."""
        return self.num_steps if fault.kind == "full_disk_at_end" else fault.step

    @property
    def num_steps(self) -> int:
        """Steps of a run that has room for all faults."""
        return num_steps(self.faults)


def num_steps(faults: Sequence[PlannedFault]) -> int:
    """Steps of a run that has room for these faults."""
    last = max((fault.step for fault in faults), default=0)
    return max(last, FIRST_STEP) + STEPS_AFTER


Cell = tuple[FaultKind, Phase]


def cells(kinds: Sequence[FaultKind], phases: Sequence[Phase]) -> Iterator[Cell]:
    """The pairs of kind and phase that can be injected."""
    for kind in kinds:
        for phase in phases:
            if phase in PHASES_OF_KIND.get(kind, phases):
                yield kind, phase


def deal(
    num_faults: int,
    *,
    kinds: Sequence[FaultKind] = FAULT_KINDS,
    phases: Sequence[Phase] = FAULT_PHASES,
    finds_corruption: Sequence[bool],
    seed: int,
) -> list[list[Cell]]:
    """Distribute `num_faults` over layouts: each kind equally often, and its phases in turn; a disk
    that is full at the end at most once a layout.

    Args:
        finds_corruption: for each layout, whether it has replicas that are compared.
    """
    draw = random.Random(seed)  # noqa: S311 - no secret
    phases_of: dict[FaultKind, list[Phase]] = {}
    for kind, phase in cells(kinds, phases):
        phases_of.setdefault(kind, []).append(phase)
    if not any(finds_corruption):
        phases_of.pop("corrupted_message", None)
    for kind_phases in phases_of.values():
        draw.shuffle(kind_phases)
    dealt: list[list[Cell]] = [[] for _ in finds_corruption]
    if not phases_of:
        return dealt
    turns: Counter[FaultKind] = Counter()
    waiting = deque(phases_of)
    while turns.total() < num_faults and waiting:
        kind = waiting.popleft()
        kind_phases = phases_of[kind]
        phase = kind_phases[turns[kind] % len(kind_phases)]
        able: list[list[Cell]] = []
        for layout, finds in zip(dealt, finds_corruption, strict=True):
            has_ended = kind == "full_disk_at_end" and (kind, phase) in layout  # one end a run
            if not has_ended and (finds or kind != "corrupted_message"):
                able.append(layout)
        if not able:
            continue  # its turns go to the other kinds
        emptiest = min(able, key=len)
        emptiest.append((kind, phase))
        turns[kind] += 1
        waiting.append(kind)
    return dealt


def plan_faults(dealt: Sequence[Cell], *, num_ranks: int, seed: int) -> tuple[PlannedFault, ...]:
    """The faults of one run, in a random order on random ranks.

    A fault in a start happens in the start that follows another fault, or in the first one; see
    `cause_of_start`.
    """
    draw = random.Random(seed)  # noqa: S311 - no secret
    at_end = [cell for cell in dealt if cell[0] == "full_disk_at_end"]
    in_steps = [cell for cell in dealt if cell[1] != "start" and cell not in at_end]
    in_starts = [cell for cell in dealt if cell[1] == "start"]
    draw.shuffle(in_steps)
    draw.shuffle(in_starts)
    faults: list[PlannedFault] = []

    def add(cell: Cell, step: int) -> None:
        kind, phase = cell
        rank = draw.randrange(num_ranks)
        if phase == "start" and _failed_in_start(rank, faults):
            rank = (rank + 1) % num_ranks  # the same failure twice would end the run
        number = len(faults)
        faults.append(PlannedFault(number, kind, phase, rank, step))

    if in_starts:
        add(in_starts.pop(), 0)
    step = FIRST_STEP
    num_left = sum(kind not in TOLERATED_KINDS for kind, _ in in_steps)
    for cell in in_steps:
        add(cell, step)
        step += STEP_GAP
        if cell[0] in TOLERATED_KINDS:
            continue
        if in_starts and draw.random() < len(in_starts) / num_left:
            add(in_starts.pop(), 0)
        num_left -= 1
    in_starts.sort(key=lambda cell: cell[0] in TOLERATED_KINDS)
    for cell in in_starts:
        add(cell, 0)
    for cell in at_end:
        add(cell, 0)
    return tuple(faults)


def cause_of_start(fault: PlannedFault, faults: Sequence[PlannedFault]) -> PlannedFault | None:
    """The fault whose restart is the start in which `fault` happens; None: the first start."""
    before = [other for other in faults[: fault.number] if other.ends_rank]
    return before[-1] if before else None


def _failed_in_start(rank: int, faults: Sequence[PlannedFault]) -> bool:
    """Whether the last fault is in a start of this rank."""
    if not faults:
        return False
    last = faults[-1]
    return last.phase == "start" and last.rank == rank
