"""Lowering: a schedule table becomes a program with sends and receives, in an order that cannot deadlock.

Note [Order of transfers]
    Simulate the table once with unit costs and put all actions in one line by the time they *end*;
    put each transfer directly behind the action that produces its tensor. An action ends after all
    actions that it needs have ended, so everything could be done one by one in the order of this
    line. Each rank's row is the part of the line that concerns it. Hence nothing deadlocks,
    whatever a backend does: not when every send and receive blocks until its partner arrives (both
    are at the same place of the line), and not without tags (tensors from one rank to another are
    sent and received in the same order).

    Because actions are placed where they end, a receive is placed before the action that its rank
    runs when the tensor is ready: it is posted in time, and the transfer overlaps with that action.
    Actions that would end together are ordered by a short hop in that simulation: without it 1F1B
    takes 1% longer, GPipe 4% and interleaved 3% to 8% with real hops of 0.2 forwards; with it
    nothing is lost (tests/schedule/test_lower.py measures it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, cast

from weft.errors import Fault, ScheduleError
from weft.schedule.actions import KEY, Act, Table
from weft.schedule.engine import PlayOrder, RankRows
from weft.schedule.simulate import intervals, unit_cost
from weft.schedule.validate_table import MAX_STUCK_SHOWN, play_order

TransferKind = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The tensor that `act` produces, between this rank and pp coordinate `peer`."""

    act: Act
    peer: int

    @property
    def kind(self) -> TransferKind:
        """A forward produces an activation, a backward the gradient of its input."""
        return "activation" if self.act.kind == "F" else "gradient"

    @property
    def stage(self) -> int:
        """Stage that produces the tensor."""
        return self.act.stage

    @property
    def mb(self) -> int:
        """Micro-batch of the tensor."""
        return self.act.mb


@dataclass(frozen=True, slots=True)
class Send(Transfer):
    """Start a send; it may be waited for at any later time."""

    def __str__(self) -> str:
        return f"send({self.act} to {self.peer})"


@dataclass(frozen=True, slots=True)
class Recv(Transfer):
    """Post a receive; the action that uses the tensor waits for it."""

    def __str__(self) -> str:
        return f"recv({self.act} from {self.peer})"


Instruction = Act | Send | Recv


@dataclass(frozen=True)
class Program:
    """What each pipeline rank does, in order: the rows of `table` with the transfers between them."""

    table: Table
    rows: tuple[tuple[Instruction, ...], ...]

    @property
    def text(self) -> str:
        """One line a rank."""
        text = ""
        for rank, row in enumerate(self.rows):
            words = " ".join(map(str, row))
            text += f"rank {rank}: {words}\n"
        return text


ORDERING_HOP = 0.0625
"""Hop in units of a forward, for the order of transfers; a power of two, so that equal times are
equal floats.
"""


def transfer_order(table: Table) -> PlayOrder:
    """All actions in the line of Note [Order of transfers].

    Raises:
        ScheduleError: when the table deadlocks.
    """
    order = play_order(table)
    ends = [interval.end for interval in intervals(order, unit_cost, hop=ORDERING_HOP)]
    # by rank where ends are equal: no two actions of a rank end together, so the line is the same everywhere
    return order.sorted_by(list(zip(ends, order.ranks, strict=True)))


def lower(table: Table) -> Program:
    """Add a send and a receive for every tensor that another rank uses. See Note [Order of
    transfers].

    Raises:
        ScheduleError: when the table deadlocks; `validate` finds the other faults.
    """
    rows: list[list[Instruction]] = [[] for _ in table.rows]
    order = transfer_order(table)
    for act, rank, consumer in zip(order.acts, order.ranks, order.consumer_of, strict=True):
        rows[rank].append(act)
        if consumer >= 0:
            receiver = order.ranks[consumer]
            rows[rank].append(Send(act, receiver))
            # at the same place of the line as the send: what the receiver's row has so far ends
            # before, what follows after
            rows[receiver].append(Recv(act, rank))
    return Program(table, tuple(map(tuple, rows)))


def grouped_transfers(row: Sequence[Instruction]) -> tuple[Act | tuple[Transfer, ...], ...]:
    """A row with the transfers between two actions together.

    They may be started as one: each makes progress, whatever the others wait for. Then every transfer
    still ends: of the first one in the line that has not, all instructions before it have ended, so
    both of its ranks have started the transfers that it is among.
    """
    parts: list[Act | tuple[Transfer, ...]] = []
    for is_act, group in groupby(row, lambda instruction: isinstance(instruction, Act)):
        if is_act:
            parts.extend(cast("Iterator[Act]", group))
        else:
            parts.append(tuple(cast("Iterator[Transfer]", group)))
    return tuple(parts)


def check_rendezvous(program: Program) -> None:
    """Run `program` on the strictest backend: every transfer blocks until its partner is at it too,
    and there are no tags.

    A program that passes runs on every backend: one that buffers, or that posts receives early,
    only waits less.

    Raises:
        ScheduleError: when the run stops, with the instruction at which each rank is blocked; or
            when an action runs before its inputs are there.
    """
    run = _RendezvousRun(program)
    waiting = run.ranks.advance(run.attempt)
    if waiting:
        positions = (run.position(each.rank) for each in waiting[:MAX_STUCK_SHOWN])
        raise _program_error("the program deadlocks", "; ".join(positions))


class _RendezvousRun:
    """Progress of each rank, and the tensors it holds."""

    def __init__(self, program: Program) -> None:
        self.table = program.table
        self.ranks = RankRows(dict(enumerate(program.rows)))
        self.held: list[set[Act]] = [set() for _ in program.rows]

    def position(self, rank: int) -> str:
        return f"rank {rank} is at {self.ranks.head(rank)}"

    def attempt(self, rank: int, instruction: Instruction) -> tuple[int, ...]:
        """An action never waits and leaves its tensor; a transfer waits for its peer and takes it
        along, then both hold the tensor.
        """
        if isinstance(instruction, Act):
            self._run(instruction, rank)
            return ()
        peer = instruction.peer
        if not self._partner_is_ready(instruction, rank):
            return (peer,)
        self.held[rank].add(instruction.act)
        self.held[peer].add(instruction.act)
        self.ranks.take_along(peer)
        return ()

    def _run(self, act: Act, rank: int) -> None:
        held = self.held[rank]
        missing = [str(need) for need in self.table.needs(act) if need not in held]
        if missing:
            what = "an action runs before its inputs are there"
            raise _program_error(what, f"{self.position(rank)} without {missing}")
        held.add(act)

    def _partner_is_ready(self, transfer: Send | Recv, rank: int) -> bool:
        """Whether the peer is at the other end of a transfer with `rank`; without tags it takes
        whatever arrives.
        """
        partner = self.ranks.head(transfer.peer)
        if partner is None or isinstance(partner, Act):
            return False
        # it is at a transfer with another rank, or both send: neither can go on here
        if partner.peer != rank or type(partner) is type(transfer):
            return False
        sender = rank if isinstance(transfer, Send) else transfer.peer
        # an error and no wait: without tags the backend would hand over the wrong tensor
        if transfer.act != partner.act or transfer.act not in self.held[sender]:
            positions = f"{self.position(rank)}; {self.position(transfer.peer)}"
            raise _program_error("a receive would get another tensor", positions)
        return True


def _program_error(what: str, got: str) -> ScheduleError:
    return ScheduleError(Fault(KEY, what, got=got))
