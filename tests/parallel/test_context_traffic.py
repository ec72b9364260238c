"""What attention across cp sends: bytes exactly, overlapped with the blocks, in an order that cannot deadlock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.attention import attend_across
from weft.comm.comm import Comm
from weft.comm.observe import Counter, Operation
from weft.comm.transport import MetaTransport, Work
from weft.core.mesh import Mesh
from weft.core.sequence import Context
from weft.models.common import attention_kernels as kernels
from weft.models.common.batch import Batch
from weft.parallel.context.attend import VARIANTS
from weft.parallel.context.kv_exchange import KeyValue
from weft.parallel.context.ring import Hop, RingExchange
from weft.testing import run_ranks

B, S, H, G, K = 2, 24, 24, 12, 8
"""Of whole sequences; 12 key heads so that ulysses can deal them out to 2, 3 and 4 ranks."""


@dataclass(frozen=True)
class EntriesSent:
    """Numbers that one rank sends in the forward and in the backward of one attention."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Traffic:
    """What one rank sent in the forward and in the backward of one attention."""

    forward: Counter
    backward: Counter

    def entries(self, dtype: torch.dtype) -> EntriesSent:
        """The numbers that were sent, of this type."""
        sent = []
        for counter in (self.forward, self.backward):
            entries, rest = divmod(counter.total().sent_bytes, dtype.itemsize)
            assert rest == 0
            sent.append(entries)
        return EntriesSent(*sent)

    def axes(self) -> set[str]:
        keys = [*self.forward.traffic, *self.backward.traffic]
        return {axis for axis, _ in keys}


def own_part(comm: Comm, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one rank, G = H / 2 key heads."""
    columns = S // comm.degree("cp")

    def ones(num_heads: int) -> Tensor:
        shape = (B, columns, num_heads, K)
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    return ones(H), ones(G), ones(G)


def traffic(comm: Comm, variant: Context, dtype: torch.dtype, device: str = "cpu") -> Traffic:
    """What one rank sends in a forward and in the backward of one attention."""
    sent = Traffic(Counter(), Counter())
    q, k, v = own_part(comm, dtype, device)
    own_length = S // comm.degree("cp")
    nothing = torch.zeros(B, own_length, dtype=torch.int64, device=device)
    batch = Batch(nothing, nothing, nothing)
    attend = attend_across(variant, comm)
    comm.observers = (sent.forward,)
    out = attend(q, k, v, batch)
    comm.observers = (sent.backward,)
    out.sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad.shape == tensor.shape
    return sent


KV = 2 * G * K
"""Numbers of a token's key and value."""


def ring_or_allgather(degree: int) -> EntriesSent:
    """The keys and values of all parts but one; backward, their gradients too."""
    part = B * (S // degree) * KV
    forward = (degree - 1) * part
    return EntriesSent(forward, 2 * forward)


def ulysses(degree: int) -> EntriesSent:
    """All but 1/c of the own queries, keys, values and outputs, either way."""
    own_tokens = B * (S // degree)
    entries_of_token = 2 * H * K + KV
    sent = (degree - 1) * own_tokens * entries_of_token // degree
    return EntriesSent(sent, sent)


FORMULAS: dict[Context, Callable[[int], EntriesSent]] = {
    "ring": ring_or_allgather,
    "allgather": ring_or_allgather,
    "ulysses": ulysses,
}


# c ranks, whole sequence s, b sequences, 2 kv entries a token: the formulas count entries that one rank sends


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sent_bytes_equal_the_formula(variant: Context, degree: int) -> None:
    """Ring: (c-1) x 2(s/c) b kv forward and twice that backward; Ulysses (c-1)/c (s/c) b (2h + 2kv)
    either way.
    """
    expected = FORMULAS[variant](degree)

    def rank(comm: Comm) -> Traffic:
        return traffic(comm, variant, torch.float64)

    for sent in run_ranks(f"cp{degree}", rank):
        assert sent.entries(torch.float64) == expected
        assert sent.axes() == {"cp"}


def test_gradients_of_16_bit_keys_are_sent_in_float32() -> None:
    entries = ring_or_allgather(4).forward

    def rank(comm: Comm) -> Traffic:
        return traffic(comm, "ring", torch.bfloat16)

    for sent in run_ranks("cp4", rank):
        keys_bytes = 2 * entries
        gradients_bytes = 4 * entries
        assert sent.forward.total().sent_bytes == keys_bytes
        assert sent.backward.total().sent_bytes == keys_bytes + gradients_bytes


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dry_run_on_meta_tensors_counts_the_same_bytes(variant: Context) -> None:
    comm = Comm(Mesh.parse("cp4"), 1, MetaTransport(4, 1))
    sent = traffic(comm, variant, torch.float32, "meta")
    assert sent.entries(torch.float32) == FORMULAS[variant](4)


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


def shortened(lines: list[str]) -> str:
    """Operations of a rank in order; a send and a receive in either order as one word."""
    words = " ".join(lines)
    for start in ("start recv start send", "start send start recv"):
        words = words.replace(start, "hop")
    for end in ("end recv end send", "end send end recv"):
        words = words.replace(end, "came")
    return words


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
        batch = Batch(nothing, nothing, nothing)
        attend = attend_across(variant, comm)
        comm.observers = (log,)
        loss = attend(q, k, v, batch).sum()
        loss.backward()
        return log.lines[threading.get_ident()]

    for lines in run_ranks("cp3", rank):
        assert shortened(lines) == TURNS[variant]


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
