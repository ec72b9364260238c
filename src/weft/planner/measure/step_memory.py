"""Memory of a rank over a whole step: its level after every instruction, its peak and the cause of the peak."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from weft.core.zero_stages import ZERO_THAT_REDUCES_EACH
from weft.layout.plan import Plan
from weft.parallel.pipeline.player import MAX_SENDS
from weft.planner.measure.played_actions import (
    PERIOD,
    ActionKey,
    PlayedAction,
    action_keys,
    alike_in_fixed_order,
    ones_at_end,
)
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
        host: most bytes of activations on the host at once.
    """

    kept: KeptBytes
    in_flight: int
    workspace: int
    parts: Parts
    cause: str
    levels: tuple[Level, ...]
    host: int = 0

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
        host=replay.host_peak,
    )


@dataclass(frozen=True)
class _Peak:
    name: str
    level: int
    region: RecordedRegion

    @property
    def bytes(self) -> int:
        return self.level + self.region.workspace


@dataclass(frozen=True)
class FixedOrderSums:
    """Bytes of a sum of gradients in a fixed order; see Note [Sums in a fixed order] in
    `played_actions`.

    Attributes:
        own: added by the backward itself.
        deferred: added by the next one, as their reduction is under way.
    """

    own: int
    deferred: int

    @staticmethod
    def of(played: Mapping[PlayedAction, RecordedRegion], action: PlayedAction) -> FixedOrderSums:
        """Of a kind of action: numbers of played ones end with 0, 1 and 0 ones, and those before
        them with 3, 0 and 1; a backward leaves one sum less the ones.
        """
        changes = []
        for number in (PERIOD, PERIOD + 1, PERIOD + 2):
            region = played.get(action._replace(microbatch=number))
            if region is None:
                return FixedOrderSums(0, 0)
            changes.append(region.change)
        deferred = (changes[2] - changes[0]) // 2
        own = changes[2] - changes[1] + deferred
        return FixedOrderSums(own, deferred)

    def freed(self, number: int, *, than: int) -> int:
        """Bytes that the backward of a micro-batch frees more than that of another one."""
        own = ones_at_end(number) - ones_at_end(than)
        deferred = ones_at_end(number - 1) - ones_at_end(than - 1)
        return own * self.own + deferred * self.deferred

    def left(self, number: int, *, than: int) -> int:
        """Bytes of the sums of so many micro-batches above those of another number of them."""
        own = number.bit_count() - than.bit_count()
        deferred = (number - 1).bit_count() - (than - 1).bit_count()
        return own * self.own + deferred * self.deferred


def _freeing(region: RecordedRegion, num_bytes: int) -> RecordedRegion:
    """The region, which frees so many bytes more."""
    return replace(region, exit_bytes=region.exit_bytes - num_bytes)


@dataclass
class _Replay:
    """The level over the instructions of a row; see Note [A step in regions].

    A sent output is freed when its send has been waited for and its backward has run.

    Attributes:
        under_way: bytes of reductions that the last action with some has left.
        host: bytes of activations on the host.
        sums_left: bytes of sums in a fixed order that the reduction frees beside what was recorded.
    """

    step: RankStep
    row: int
    level: int = 0
    peak: _Peak = field(init=False)
    sends: deque[Transfer] = field(default_factory=deque)
    retained: set[Act] = field(default_factory=set)
    sums_left: int = 0
    under_way: int = 0
    host: int = 0
    host_peak: int = 0

    def run(self) -> Iterator[Level]:
        plan = self.step.plan
        keys = action_keys(plan.table, self.row)
        phases = self.step.phases
        self.peak = _Peak("targets", 0, phases["targets"])
        yield self._pass("targets", phases["targets"])
        for instruction in plan.program.rows[self.row]:
            if isinstance(instruction, Act):
                region = self._region(instruction, keys[instruction])
                yield self._pass(str(instruction), region)
                self._release_output(instruction)
            else:
                self._transfer(instruction)
        while self.sends:
            self._finish_send()
        for name in ("reduce", "update"):
            yield self._pass(name, self._phase(name))

    def _region(self, act: Act, key: ActionKey) -> RecordedRegion:
        """The recorded region that stands for an action."""
        region = self.step.actions[key]
        played = self.step.in_fixed_order
        own = PlayedAction(act.kind, key.chunk, act.mb)
        if not played or self._is_played_whole:
            return played.get(own, region)
        if key.place == "first":
            return region
        sums = FixedOrderSums.of(played, own)
        last = self.step.played.microbatches - 1
        if key.place == "middle":
            alike = own._replace(microbatch=alike_in_fixed_order(act.mb))
            freed = sums.freed(act.mb, than=alike.microbatch)
            return _freeing(played.get(alike, region), freed)
        if self.step.plan.zero >= ZERO_THAT_REDUCES_EACH:
            self.sums_left += sums.left(act.mb + 1, than=last + 1)
            return _freeing(region, sums.freed(act.mb, than=last))
        return _freeing(region, sums.left(act.mb, than=last))

    @property
    def _is_played_whole(self) -> bool:
        return self.step.played.microbatches == self.step.plan.microbatches

    def _phase(self, name: str) -> RecordedRegion:
        region = self.step.phases[name]
        return _freeing(region, self.sums_left) if name == "reduce" else region

    def _pass(self, name: str, region: RecordedRegion) -> Level:
        before = self.level
        peak = _Peak(name, before, region)
        if peak.bytes > self.peak.bytes:
            self.peak = peak
        self.level += region.change
        self.host += region.host_change
        self.host_peak = max(self.host_peak, self.host)
        self._exchange_under_way(region)
        kept = self.step.kept.total
        return Level(name, kept + self.level, kept + peak.bytes)

    def _exchange_under_way(self, region: RecordedRegion) -> None:
        """Correct the level where other reductions were under way when the region was recorded: it
        frees those that are there, and leaves its own.
        """
        if region.entry_under_way == region.exit_under_way and not region.starts_reductions:
            return
        self.level -= self.under_way - region.entry_under_way
        self.under_way = region.exit_under_way

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
