"""Memory of a rank over a whole step: its level after every instruction, its peak and the cause of the peak."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from weft.layout.plan import Plan
from weft.parallel.pipeline.player import MAX_SENDS
from weft.planner.measure.played_actions import action_keys
from weft.planner.measure.rank_step import KeptBytes, RankStep
from weft.planner.measure.recorder import Parts, RecordedRegion
from weft.schedule.actions import Act
from weft.schedule.lower import Instruction, Recv, Transfer


@dataclass(frozen=True)
class Level:
    """Bytes of a rank when an instruction or phase has ended.

    Attributes:
        name: of the instruction or phase.
        held: after it.
        most: during it.
    """

    name: str
    held: int
    most: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of one rank during a step.

    Attributes:
        kept: between steps.
        in_flight: at the peak, activations and messages that earlier instructions left.
        workspace: at the peak, what the running instruction holds above that.
        parts: of the workspace: buffers of known use.
        cause: instruction and block of the peak.
        levels: in order.
    """

    kept: KeptBytes
    in_flight: int
    workspace: int
    parts: Parts
    cause: str
    levels: tuple[Level, ...]

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return self.kept.total + self.in_flight + self.workspace


def boundary_bytes(plan: Plan, transfer: Transfer) -> int:
    """Size of the tensor of a send or receive."""
    is_activation = transfer.kind == "activation"
    boundary = transfer.stage if is_activation else transfer.stage - 1
    num_entries = math.prod(plan.boundary_shape(boundary))
    dtype: torch.dtype = getattr(torch, plan.compute)
    return num_entries * dtype.itemsize


def step_memory(step: RankStep, row: int) -> StepMemory:
    """Memory during the whole step of the rank at pipeline coordinate `row`, whose stages are equal
    to those that were measured.
    """
    replay = _Replay(step, row)
    levels = tuple(replay.run())
    peak = replay.peak
    cause = peak.name
    if peak.region.peak_block:
        cause = f"{peak.name} in {peak.region.peak_block}"
    return StepMemory(
        kept=step.kept,
        in_flight=peak.level,
        workspace=peak.region.workspace,
        parts=peak.region.peak_parts,
        cause=cause,
        levels=levels,
    )


@dataclass(frozen=True)
class _Peak:
    name: str
    level: int
    region: RecordedRegion

    @property
    def bytes(self) -> int:
        return self.level + self.region.workspace


@dataclass
class _Replay:
    """The level over the instructions of a row; see Note [A step in regions].

    A sent output is freed when its send has been waited for and its backward has run.
    """

    step: RankStep
    row: int
    level: int = 0
    peak: _Peak = field(init=False)
    sends: deque[Transfer] = field(default_factory=deque)
    retained: set[Act] = field(default_factory=set)

    def run(self) -> Iterator[Level]:
        plan = self.step.plan
        keys = action_keys(plan.table, self.row)
        phases = self.step.phases
        self.peak = _Peak(
            "targets",
            0,
            phases["targets"],
        )
        yield self._pass("targets", phases["targets"])
        for instruction in plan.program.rows[self.row]:
            if isinstance(instruction, Act):
                yield self._pass(str(instruction), self.step.actions[keys[instruction]])
                self._release_output(instruction)
            else:
                self._transfer(instruction)
        while self.sends:
            self._finish_send()
        for name in ("reduce", "update"):
            yield self._pass(name, phases[name])

    def _pass(self, name: str, region: RecordedRegion) -> Level:
        before = self.level
        peak = _Peak(name, before, region)
        if peak.bytes > self.peak.bytes:
            self.peak = peak
        self.level += region.change
        kept = self.step.kept.total
        return Level(
            name,
            kept + self.level,
            kept + peak.bytes,
        )

    def _transfer(self, transfer: Instruction) -> None:
        assert isinstance(transfer, Transfer)
        if isinstance(transfer, Recv):
            self.level += boundary_bytes(self.step.plan, transfer)
            return
        self.sends.append(transfer)
        if len(self.sends) > MAX_SENDS:
            self._finish_send()

    def _finish_send(self) -> None:
        """A sent gradient is freed; so is an activation whose backward has run."""
        transfer = self.sends.popleft()
        has_ended = transfer.kind == "gradient" or transfer.act in self.retained
        if has_ended:
            self.level -= boundary_bytes(self.step.plan, transfer)
        else:
            self.retained.add(transfer.act)

    def _release_output(self, act: Act) -> None:
        """The backward of an activation that was sent has run: its output is freed, if the send has
        been waited for.
        """
        if act.kind not in ("B", "I"):
            return
        forward = Act("F", act.stage, act.mb)
        sent = {transfer.act: transfer for transfer in self.sends}
        if forward in sent:
            self.retained.add(forward)
        elif forward in self.retained:
            self.level -= boundary_bytes_of(self.step.plan, forward)


def boundary_bytes_of(plan: Plan, forward: Act) -> int:
    """Size of the output of a forward of a stage that is not the last one."""
    return boundary_bytes(plan, Transfer(forward, 0))
