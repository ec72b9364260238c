"""Owns lowering: a table becomes a program, with sends and receives in an order that cannot deadlock.

Note [Order of transfers]
    Play the table once with textbook costs and lay all actions in one line by the time they *end*; put each transfer
    right behind the action that makes its tensor. An action ends after all it needs has ended, so everything could
    be done one by one in the order of this line. Each rank's row is the part of the line that concerns it. Hence
    nothing deadlocks, whatever a backend does: not when every send and receive blocks until its partner comes (both
    stand at the same place of the line), and not without tags (what travels from one rank to another is sent and
    received in the same order).

    Because actions stand where they end, a receive stands before the action that its rank runs when the tensor is
    ready: it is posted in time, and the transfer overlaps with that action. Actions that would end together are told
    apart by a short hop in that play: without it 1F1B takes 1% longer, GPipe 4% and interleaved 3% to 8% with real
    hops of 0.2 forwards; with it nothing is lost (tests/core/test_lower.py measures it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weft.errors import Fault, ScheduleError
from weft.schedule.actions import KEY, Act, Table
from weft.schedule.simulate import play_times, textbook_cost

Cargo = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The tensor that `act` makes, between this rank and pp coordinate `peer`."""

    act: Act
    peer: int

    @property
    def kind(self) -> Cargo:
        """What travels: a forward makes an activation, a backward the gradient of its input."""
        return "activation" if self.act.kind == "F" else "gradient"

    @property
    def stage(self) -> int:
        """Stage that makes the tensor."""
        return self.act.stage

    @property
    def mb(self) -> int:
        """Micro-batch of the tensor."""
        return self.act.mb


@dataclass(frozen=True, slots=True)
class Send(Transfer):
    """Start to send; it may be waited for at any later time."""

    def __str__(self) -> str:
        return f"send({self.act} to {self.peer})"


@dataclass(frozen=True, slots=True)
class Recv(Transfer):
    """Post a receive; the action that takes the tensor in waits for it."""

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
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows)) + "\n"


ORDERING_HOP = 0.0625
"""Forwards that a hop takes when the order is made; a power of two, so that equal times are equal floats."""


def lower(table: Table) -> Program:
    """Add a send and a receive for every tensor that goes to another rank. See Note [Order of transfers].

    Raises:
        ScheduleError: when the table deadlocks; `validate` finds the other faults.
    """
    rows: list[list[Instruction]] = [[] for _ in table.rows]
    consumer = {table.source(act): act for row in table.rows for act in row}
    times = play_times(table, textbook_cost, hop=ORDERING_HOP)
    for act in sorted(times, key=lambda act: (times[act][1], table.home[act.stage])):
        rank = table.home[act.stage]
        peer = table.home[consumer[act].stage] if act in consumer else rank
        rows[rank].append(act)
        if peer != rank:
            rows[rank].append(Send(act, peer))
            rows[peer].append(Recv(act, rank))
    return Program(table, tuple(map(tuple, rows)))


def check_rendezvous(program: Program) -> None:
    """Play `program` on the strictest backend: every transfer blocks until its partner stands at it too, and no tags.

    What plays here plays everywhere: a backend that buffers, or that takes receives early, only waits less.

    Raises:
        ScheduleError: when the play stops, naming the instruction at which each rank stands; or when an action runs
            before its tensors are there.
    """
    player = _Rendezvous(program)
    woken = deque(range(len(program.rows)))
    while woken:
        woken.extend(player.advance(woken.popleft()))
    if stuck := [rank for rank, row in enumerate(program.rows) if player.reached[rank] < len(row)]:
        raise _broken("the program deadlocks", "; ".join(map(player.stands, stuck[:8])))


class _Rendezvous:
    """How far each rank has come, and what it holds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reached = [0] * len(program.rows)
        self.held: list[set[Act]] = [set() for _ in program.rows]

    def current(self, rank: int) -> Instruction | None:
        row = self.program.rows[rank]
        return row[self.reached[rank]] if self.reached[rank] < len(row) else None

    def stands(self, rank: int) -> str:
        return f"rank {rank} stands at {self.current(rank)}"

    def advance(self, rank: int) -> Iterator[int]:
        """Run `rank` until it blocks; give the ranks that it set free."""
        while (instruction := self.current(rank)) is not None:
            if isinstance(instruction, Act):
                self._run(instruction, rank)
            elif self._meets(instruction, rank):
                self.held[rank].add(instruction.act)
                self.held[instruction.peer].add(instruction.act)
                self.reached[instruction.peer] += 1
                yield instruction.peer
            else:
                return
            self.reached[rank] += 1

    def _run(self, act: Act, rank: int) -> None:
        if missing := [str(need) for need in self.program.table.needs(act) if need not in self.held[rank]]:
            raise _broken("an action runs before its tensors are there", f"{self.stands(rank)} without {missing}")
        self.held[rank].add(act)

    def _meets(self, mine: Send | Recv, rank: int) -> bool:
        """Whether the peer stands at the other end of a transfer with `rank`; without tags it takes what comes."""
        theirs = self.current(mine.peer)
        if theirs is None or isinstance(theirs, Act) or theirs.peer != rank or type(theirs) is type(mine):
            return False
        sender = rank if isinstance(mine, Send) else mine.peer
        if mine.act != theirs.act or mine.act not in self.held[sender]:
            raise _broken("a transfer brings another tensor", f"{self.stands(rank)}; {self.stands(mine.peer)}")
        return True


def _broken(what: str, got: str) -> ScheduleError:
    return ScheduleError(Fault(KEY, what, got=got))
