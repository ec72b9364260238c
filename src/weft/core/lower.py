"""Owns lowering: a table becomes a program, with sends and receives in an order that cannot deadlock.

Note [Order of transfers]
    Play the table once with textbook costs and lay all actions in one line by the time they *end*; put each transfer
    right behind the action that makes its tensor. An action ends after all it needs has ended, so this one line is
    an order in which everything could be done one by one. Each rank's row is the part of the line that concerns it.
    Hence nothing can deadlock, whatever a backend does: not if every send and receive blocks until its partner comes
    (both stand at the same place of the line), and not without tags (the transfers between two ranks come in the
    same order on both). Because an action stands where it ends, a receive stands before the action that runs
    while its tensor is made: it is posted early, and the transfer overlaps with that action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.core.schedule import Act, Table
from weft.core.simulate import play_times, textbook_cost

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


def lower(table: Table) -> Program:
    """Add a send and a receive for every tensor that goes to another rank. See Note [Order of transfers].

    Raises:
        ScheduleError: when the table deadlocks; `validate` finds the other faults.
    """
    rows: list[list[Instruction]] = [[] for _ in table.rows]
    consumers = {table.source(act): act for row in table.rows for act in row}
    end = {act: end_s for act, (_, end_s) in play_times(table, textbook_cost).items()}
    for act in sorted(end, key=lambda act: (end[act], table.home[act.stage])):
        rank = table.home[act.stage]
        rows[rank].append(act)
        peer = table.home[consumers[act].stage] if act in consumers else rank
        if peer != rank:
            rows[rank].append(Send(act, peer))
            rows[peer].append(Recv(act, rank))
    return Program(table, tuple(map(tuple, rows)))
