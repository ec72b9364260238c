"""Observers: counts of operations and bytes per (axis, op) are exact and equal on every transport."""

from dataclasses import replace

import torch

from weft.comm.comm import Comm
from weft.comm.observe import Counter, Operation, Traffic
from weft.comm.signature import NO_SIGNATURE
from weft.comm.transport import MetaTransport
from weft.core.mesh import Mesh
from weft.testing import run_ranks

FLOAT_BYTES = 4
WHOLE = 96  # bytes of x: 8 x 3 floats
ROW = 12  # bytes of one row of x
N = 4  # degree of tp


def observed(comm, *observers):
    """A second Comm over the transport of `comm`, with these observers."""
    return Comm(comm.mesh, comm.rank, comm.transport, observers=observers)


def run_every_operation(comm):
    """One call of each operation along tp; x is 8 x 3 floats, rank 1 is the root."""
    index = comm.index("tp")
    x = torch.ones(8, 3, device=comm.device)
    pieces = [x] * N if index == 1 else None
    comm.all_reduce(x, "tp")
    comm.all_gather(x, "tp")
    comm.all_gather(x[:index], "tp", sizes=[0, 1, 2, 3])
    comm.reduce_scatter(x, "tp")
    comm.all_to_all(x, "tp")
    comm.broadcast_(x, "tp", root=1)
    comm.gather(x, "tp", root=1)
    comm.scatter(pieces, x.clone(), "tp", root=1)
    comm.barrier("tp")
    comm.all_reduce(x, "cp")
    comm.all_reduce(x, ("tp", "dp", "cp"))


def traffic_of_every_operation(comm):
    counter = Counter()
    run_every_operation(observed(comm, counter))
    return counter.traffic


SENT_IN_UNEVEN_GATHER = (0 + 1 + 3) * ROW
"""By rank 1 with pieces of 0, 1, 2 and 3 rows: all but the piece of rank 2, the next one."""

EXPECTED_ON_RANK_1 = {
    ("tp", "all_reduce"): Traffic(1, WHOLE, 2 * (N - 1) * WHOLE // N),
    ("tp", "all_gather"): Traffic(2, WHOLE + ROW, (N - 1) * WHOLE + SENT_IN_UNEVEN_GATHER),
    ("tp", "reduce_scatter"): Traffic(1, WHOLE, (N - 1) * WHOLE // N),
    ("tp", "all_to_all"): Traffic(1, WHOLE, (N - 1) * WHOLE // N),
    ("tp", "broadcast"): Traffic(1, WHOLE, (N - 1) * WHOLE),
    ("tp", "gather"): Traffic(1, WHOLE, 0),
    ("tp", "scatter"): Traffic(1, N * WHOLE, (N - 1) * WHOLE),
    ("tp", "barrier"): Traffic(1, 0, 0),
    ("dp+tp", "all_reduce"): Traffic(1, WHOLE, 2 * 7 * WHOLE // 8),
}


def test_every_transport_counts_the_same(transport):
    traffic = run_ranks("dp2 tp4", traffic_of_every_operation, transport=transport)
    assert traffic[1] == EXPECTED_ON_RANK_1
    assert traffic[0]["tp", "broadcast"].sent_bytes == 0
    assert traffic[0]["tp", "gather"].sent_bytes == WHOLE
    assert traffic[0]["tp", "scatter"] == Traffic(1, WHOLE, 0)


def test_a_dry_run_without_other_ranks_counts_the_same():
    mesh = Mesh.parse("dp2 tp4")
    comm = Comm(mesh, 1, MetaTransport(8, 1))
    assert traffic_of_every_operation(comm) == EXPECTED_ON_RANK_1


def test_sent_bytes_of_a_ring_add_up_to_what_crosses_the_network():
    sizes = [1, 5, 0, 2]

    def sent_bytes(comm):
        counter = Counter()
        seen = observed(comm, counter)
        seen.all_gather(torch.ones(sizes[comm.rank]), "dp", sizes=sizes)
        seen.reduce_scatter(torch.ones(8), "dp", sizes=sizes)
        gather = counter.traffic["dp", "all_gather"]
        scatter = counter.traffic["dp", "reduce_scatter"]
        return gather.sent_bytes, scatter.sent_bytes

    per_rank = run_ranks("dp4", sent_bytes)
    each_piece_to_three_others = 3 * sum(sizes) * FLOAT_BYTES
    assert sum(gather for gather, _ in per_rank) == each_piece_to_three_others
    assert sum(scatter for _, scatter in per_rank) == each_piece_to_three_others


def test_messages_count_at_the_sender():
    def traffic_of_a_message(comm):
        counter = Counter()
        seen = observed(comm, counter)
        x = torch.ones(5, dtype=torch.float64)
        if comm.rank == 0:
            seen.send(x, "pp", to=1)
        else:
            seen.recv(x, "pp", source=0)
        return counter.traffic

    sender, receiver = run_ranks("pp2", traffic_of_a_message)
    assert sender == {("pp", "send"): Traffic(1, 40, 40)}
    assert receiver == {("pp", "recv"): Traffic(1, 40, 0)}


class RecordingObserver:
    """Keeps (event, operation) in order."""

    def __init__(self):
        self.events = []

    def started(self, op):
        self.events.append(("started", op))

    def finished(self, op):
        self.events.append(("finished", op))


def test_observers_see_start_and_first_wait_with_the_same_record():
    def events_of_two_operations(comm):
        observer = RecordingObserver()
        seen = observed(comm, observer)
        first = seen.start_all_reduce(torch.ones(2), "dp")
        seen.barrier("dp")
        first.wait()
        first.wait()
        return observer.events

    events = run_ranks("dp2 tp2", events_of_two_operations)[3]
    assert events[0][1].signature.text == "all_reduce(sum) float32[2]"
    events = [(name, replace(op, signature=NO_SIGNATURE)) for name, op in events]
    all_reduce = Operation("all_reduce", "dp", (1, 3), 3, payload_bytes=8, sent_bytes=8)
    barrier = Operation("barrier", "dp", (1, 3), 3, payload_bytes=0, sent_bytes=0)
    assert events == [
        ("started", all_reduce),
        ("started", barrier),
        ("finished", barrier),
        ("finished", all_reduce),
    ]


def test_one_counter_may_be_shared_by_all_ranks():
    counter = Counter()

    def all_reduce_often(comm):
        seen = observed(comm, counter)
        for _ in range(50):
            seen.all_reduce(torch.ones(1), "dp")

    run_ranks("dp8", all_reduce_often)
    sent_per_call = 2 * 7 * FLOAT_BYTES // 8
    assert counter.total() == Traffic(400, 400 * FLOAT_BYTES, 400 * sent_per_call)
