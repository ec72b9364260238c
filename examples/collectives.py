"""The collectives, one by one: what every rank has before, and what it has after.

    .venv/bin/python examples/collectives.py

Four ranks along one mesh axis, "dp"; the same calls work along every axis of every mesh.

    all_reduce          all_gather          reduce_scatter          all_to_all

    a ─┐   ┌─> a+b+c    a ─┐   ┌─> a b c    a0 a1 a2 ─┐   ┌─> sum0  a0 a1 a2 ─┐   ┌─> a0 b0 c0
    b ─┼─>─┼─> a+b+c    b ─┼─>─┼─> a b c    b0 b1 b2 ─┼─>─┼─> sum1  b0 b1 b2 ─┼─>─┼─> a1 b1 c1
    c ─┘   └─> a+b+c    c ─┘   └─> a b c    c0 c1 c2 ─┘   └─> sum2  c0 c1 c2 ─┘   └─> a2 b2 c2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from example_tools import numbers, same, say, table
from torch import Tensor

import weft
from weft import Comm

RANKS = 4
AXIS = "dp"


@dataclass(frozen=True)
class Lesson:
    """A collective, and the same on one process from `xs`, the inputs of all ranks: `count` numbers
    each.
    """

    name: str
    meaning: str
    together: Callable[[Comm, Tensor], Tensor | None]
    alone: Callable[[Sequence[Tensor], int], Tensor | None]
    count: int = RANKS


def input_of(rank: int, count: int = RANKS) -> Tensor:
    """The input of rank 2 is [20 21 22 23]."""
    return 10.0 * rank + torch.arange(count, dtype=torch.float64)


def total(xs: Sequence[Tensor]) -> Tensor:
    """The sum on one process."""
    return torch.stack([*xs]).sum(0)


def scatter(comm: Comm, x: Tensor) -> Tensor:
    """Only the root passes pieces; every rank passes the memory for its own."""
    pieces = x.split(1) if comm.index(AXIS) == 3 else None
    return comm.scatter(pieces, torch.empty(1, dtype=x.dtype), AXIS, root=3)


def gather(comm: Comm, x: Tensor) -> Tensor | None:
    """The root gets a tuple, the others None."""
    pieces = comm.gather(x, AXIS, root=1)
    return None if pieces is None else torch.cat(pieces)


def ring(comm: Comm, x: Tensor) -> Tensor:
    """Send and receive at once. With a blocking `send` every rank would wait for a rank that waits
    too: a deadlock.
    """
    me = comm.index(AXIS)
    send = comm.start_send(x, AXIS, to=(me + 1) % RANKS)
    received = comm.recv(torch.empty_like(x), AXIS, source=(me - 1) % RANKS)
    send.wait()
    return received


# fmt: off
LESSONS = (
    Lesson("all_reduce", "every rank gets the sum",
           lambda comm, x: comm.all_reduce(x, AXIS), lambda xs, _: total(xs)),
    Lesson("all_reduce avg", "every rank gets the mean",
           lambda comm, x: comm.all_reduce(x, AXIS, op="avg"), lambda xs, _: total(xs) / RANKS),
    Lesson("all_reduce max", "every rank gets the largest",
           lambda comm, x: comm.all_reduce(x, AXIS, op="max"), lambda xs, _: torch.stack([*xs]).amax(0)),
    Lesson("all_gather", "every rank gets all inputs, in the order of ranks",
           lambda comm, x: comm.all_gather(x, AXIS), lambda xs, _: torch.cat([*xs]), count=2),
    Lesson("reduce_scatter", "each rank gets one piece of the sum",
           lambda comm, x: comm.reduce_scatter(x, AXIS), lambda xs, me: total(xs)[me : me + 1]),
    Lesson("all_to_all", "piece j goes to rank j: rows become columns",
           lambda comm, x: comm.all_to_all(x, AXIS), lambda xs, me: torch.stack([*xs])[:, me]),
    Lesson("broadcast", "every rank gets the input of the root, here rank 2",
           lambda comm, x: comm.broadcast_(x.clone(), AXIS, root=2), lambda xs, _: xs[2]),
    Lesson("scatter", "every rank gets one piece of the input of the root, here rank 3", scatter,
           lambda xs, me: xs[3][me : me + 1]),
    Lesson("gather", "the root, here rank 1, gets all inputs", gather,
           lambda xs, me: torch.cat([*xs]) if me == 1 else None, count=2),
    Lesson("send and recv", "a ring: to the rank after, from the rank before", ring, lambda xs, me: xs[me - 1]),
)
# fmt: on


def teach(lesson: Lesson, comm: Comm) -> None:
    """Show one collective and compare it with one process."""
    me, xs = comm.index(AXIS), [input_of(rank, lesson.count) for rank in range(RANKS)]
    after, want = lesson.together(comm, xs[me]), lesson.alone(xs, me)
    say(comm, f"\n{lesson.name}: {lesson.meaning}")
    table(comm, ("before", "after"), (numbers(xs[me]), "-" if after is None else numbers(after)))
    if after is None or want is None:
        assert after is want, f"{lesson.name}: only the root gets a result"
        return
    same(lesson.name, after, want)


def teach_waiting(comm: Comm) -> None:
    """Start, compute, wait. Rank 3 starts only after the others have sent it a message that they
    have started.
    """
    me, seen, go = comm.index(AXIS), "started last", torch.zeros(1)
    if me == 3:
        for early in range(3):
            comm.recv(go, AXIS, source=early)
    work = comm.start_all_reduce(input_of(me), AXIS)
    if me < 3:  # here a program computes what does not need the sum
        seen = str(work.is_completed())
        comm.send(go, AXIS, to=3)
    after = work.wait()
    say(comm, "\nstart_all_reduce: start and wait are two calls, with time to compute between them")
    table(comm, ("is_completed() after start", "after wait()"), (seen, numbers(after)))
    same("start_all_reduce", after, total([input_of(rank) for rank in range(RANKS)]))
    assert seen != "True", "no rank has the sum before rank 3 has started"


def main() -> None:
    comm = weft.init(f"{AXIS}{RANKS}", device="cpu")
    for lesson in LESSONS:
        teach(lesson, comm)
    teach_waiting(comm)
    comm.barrier(AXIS)
    say(
        comm, f"\nequal: {len(LESSONS) + 1} lessons on {RANKS} ranks give what one process computes"
    )


if __name__ == "__main__":
    main()
