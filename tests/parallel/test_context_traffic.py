"""What attention across cp sends: bytes exactly, overlapped with the blocks, in an order that cannot deadlock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from tests.attention import attend_across
from weft.comm.comm import Comm
from weft.comm.meta import MetaTransport
from weft.comm.observe import Counter, Operation
from weft.comm.transport import Work
from weft.core.mesh import Mesh
from weft.core.sequence import Context
from weft.models.common.batch import Batch
from weft.parallel.context import kernels
from weft.parallel.context.attend import VARIANTS
from weft.parallel.context.kv_exchange import KeyValue
from weft.parallel.context.ring import Hop, RingExchange
from weft.testing import run_ranks

B, S, H, G, K = 2, 24, 24, 12, 8
"""Of whole sequences; 12 key heads so that ulysses can deal them out to 2, 3 and 4 ranks."""


def own_part(comm: Comm, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one rank, G = H / 2 key heads."""
    columns = S // comm.degree("cp")
    sizes = (H, G, G)
    return tuple(
        torch.ones(B, columns, n, K, dtype=dtype, device=device, requires_grad=True) for n in sizes
    )


def traffic(
    comm: Comm, variant: Context, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Counter, Counter]:
    """What one rank sends in a forward and in the backward of one attention."""
    forward = Counter()
    backward = Counter()
    q, k, v = own_part(comm, dtype, device)
    own_length = S // comm.degree("cp")
    nothing = torch.zeros(B, own_length, dtype=torch.int64, device=device)
    attend = attend_across(variant, comm)
    comm.observers = (forward,)
    batch = Batch(nothing, nothing, nothing)
    out = attend(q, k, v, batch)
    comm.observers = (backward,)
    out.sum().backward()
    shapes = [x.grad.shape for x in (q, k, v)]
    expected = [x.shape for x in (q, k, v)]
    assert shapes == expected
    return forward, backward


# c ranks, whole sequence s, b sequences, 2 kv entries a token: the formulas count entries that one rank sends
KV = 2 * G * K
FORMULAS: dict[Context, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "ring": (lambda c: (c - 1) * (S // c) * B * KV, lambda c: 2 * (c - 1) * (S // c) * B * KV),
    "allgather": (lambda c: (c - 1) * (S // c) * B * KV, lambda c: 2 * (c - 1) * (S // c) * B * KV),
    "ulysses": (lambda c: (c - 1) * (S // c) * B * (2 * H * K + KV) // c,) * 2,
}


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sent_bytes_equal_the_formula(variant: Context, degree: int) -> None:
    """Ring: (c-1) x 2(s/c) b kv forward and twice that backward; Ulysses (c-1)/c (s/c) b (2h + 2kv)
    either way.
    """
    expected = tuple(8 * formula(degree) for formula in FORMULAS[variant])
    for forward, backward in run_ranks(
        f"cp{degree}", lambda comm: traffic(comm, variant, torch.float64)
    ):
        assert (forward.total().sent_bytes, backward.total().sent_bytes) == expected
        actual = {axis for axis, _ in (*forward.traffic, *backward.traffic)}
        assert actual == {"cp"}


def test_gradients_of_16_bit_keys_are_sent_in_float32() -> None:
    for forward, backward in run_ranks("cp4", lambda comm: traffic(comm, "ring", torch.bfloat16)):
        entries = FORMULAS["ring"][0](4)
        assert forward.total().sent_bytes == 2 * entries
        assert backward.total().sent_bytes == 2 * entries + 4 * entries


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dry_run_on_meta_tensors_counts_the_same_bytes(variant: Context) -> None:
    comm = Comm(Mesh.parse("cp4"), 1, MetaTransport(4, 1))
    forward, backward = traffic(comm, variant, torch.float32, "meta")
    expected = tuple(4 * formula(4) for formula in FORMULAS[variant])
    assert (forward.total().sent_bytes, backward.total().sent_bytes) == expected


class OperationLog:
    """Observer that records the operations of each rank, in order."""

    def __init__(self) -> None:
        self.lines: dict[int, list[str]] = {}

    def note(self, word: str) -> None:
        self.lines.setdefault(threading.get_ident(), []).append(word)

    def started(self, op: Operation) -> None:
        self.note(f"start {op.op}")

    def finished(self, op: Operation) -> None:
        self.note(f"end {op.op}")


@pytest.mark.parametrize("variant", ["ring", "allgather"])
def test_transfers_overlap_the_computation_of_a_block(
    variant: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OperationLog()
    for name in ("attend", "attend_backward"):
        right = getattr(kernels, name)

        def noted(*given: object, name: str = name, right: Callable[..., object] = right) -> object:
            log.note(name)
            return right(*given)

        monkeypatch.setattr(kernels, name, noted)

    def rank(comm: Comm) -> list[str]:
        q, k, v = own_part(comm, torch.float32)
        nothing = torch.zeros(B, S // 3, dtype=torch.int64)
        comm.observers = (log,)
        attend = attend_across(variant, comm)
        loss = attend(q, k, v, Batch(nothing, nothing, nothing)).sum()
        loss.backward()
        return log.lines[threading.get_ident()]

    for lines in run_ranks("cp3", rank):
        words = (
            " ".join(lines)
            .replace("start recv start send", "hop")
            .replace("start send start recv", "hop")
        )
        words = words.replace("end recv end send", "came").replace("end send end recv", "came")
        assert words == TURNS[variant]


TURNS = {
    "ring": (
        "hop attend came hop attend came attend "  # keys and values
        "hop attend_backward came hop attend_backward hop came attend_backward came hop came"  # and their gradients
    ),
    "allgather": (
        "start all_gather attend end all_gather attend attend start all_gather attend_backward end all_gather "
        "attend_backward attend_backward start reduce_scatter end reduce_scatter"
    ),
}


class MessageRecorder:
    """A comm that records in which order a rank starts its messages."""

    def __init__(self, index: int, degree: int) -> None:
        self.place, self.size = index, degree
        self.messages: list[tuple[int, int]] = []

    def degree(self, axis: str) -> int:
        return self.size

    def index(self, axis: str) -> int:
        return self.place

    def grouped_messages(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_send(self, x: Tensor, axis: str, *, to: int) -> Work:
        self.messages.append((self.place, to))
        return Work.done(x)

    def start_recv(self, out: Tensor, axis: str, *, source: int) -> Work:
        self.messages.append((source, self.place))
        return Work.done(out)


@pytest.mark.parametrize(
    ("degree", "step"), [(degree, step) for degree in range(3, 10) for step in range(1, degree)]
)
def test_hops_cannot_deadlock_with_blocking_messages(degree: int, step: int) -> None:
    """One line a pair, no tags, sends and receives one after the other on each rank; two ranks
    exchange in one operation.
    """
    rows = []
    for index in range(degree):
        recorder = MessageRecorder(index, degree)
        sent = KeyValue.of(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        for _ in range(3):
            Hop(RingExchange(recorder, "cp"), sent, step=step)  # type: ignore[arg-type]
        rows.append(recorder.messages)
    while any(rows):
        heads = [row[0] for row in rows if row]
        matched = next((message for message in heads if heads.count(message) == 2), None)
        assert matched is not None, f"deadlock: {heads}"
        for row in rows:
            if row and row[0] == matched:
                row.pop(0)
