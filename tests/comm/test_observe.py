"""What is counted is exact: operations and bytes by (axis, op), on every transport alike."""

import torch

from weft.comm.comm import Comm
from weft.comm.meta import MetaTransport
from weft.comm.observe import Counter, Operation, Traffic
from weft.core.mesh import Mesh
from weft.testing import run_ranks

FLOAT = 4


def play(comm):
    """One of each, along tp of degree 4; x is 8 x 3 floats = 96 bytes."""
    x = torch.ones(8, 3, device=comm.device)
    comm.all_reduce(x, "tp")
    comm.all_gather(x, "tp")
    comm.all_gather(x[: comm.index("tp")], "tp", sizes=[0, 1, 2, 3])
    comm.reduce_scatter(x, "tp")
    comm.all_to_all(x, "tp")
    comm.broadcast_(x, "tp", root=1)
    comm.gather(x, "tp", root=1)
    comm.scatter([x] * 4 if comm.index("tp") == 1 else None, x.clone(), "tp", root=1)
    comm.barrier("tp")
    comm.all_reduce(x, "cp")
    comm.all_reduce(x, ("tp", "dp", "cp"))


def counted(comm):
    counter = Counter()
    play(Comm(comm.mesh, comm.rank, comm.transport, observers=(counter,)))
    return counter.traffic


EXPECTED = {  # of rank 1, the root; n = 4, whole = 96, row = 12 bytes
    ("tp", "all_reduce"): Traffic(1, 96, 2 * 3 * 96 // 4),
    ("tp", "all_gather"): Traffic(2, 96 + 12, 3 * 96 + (0 + 1 + 3) * 12),  # all but the piece of rank 2, the next
    ("tp", "reduce_scatter"): Traffic(1, 96, 3 * 96 // 4),
    ("tp", "all_to_all"): Traffic(1, 96, 3 * 96 // 4),
    ("tp", "broadcast"): Traffic(1, 96, 3 * 96),
    ("tp", "gather"): Traffic(1, 96, 0),
    ("tp", "scatter"): Traffic(1, 4 * 96, 3 * 96),
    ("tp", "barrier"): Traffic(1, 0, 0),
    ("dp+tp", "all_reduce"): Traffic(1, 96, 2 * 7 * 96 // 8),
}


def test_every_transport_counts_the_same(transport):
    traffic = run_ranks("dp2 tp4", counted, transport=transport)
    assert traffic[1] == EXPECTED
    assert traffic[0]["tp", "broadcast"].sent_bytes == 0
    assert traffic[0]["tp", "gather"].sent_bytes == 96
    assert traffic[0]["tp", "scatter"] == Traffic(1, 96, 0)


def test_nobody_counts_the_same_as_everybody():
    mesh = Mesh.parse("dp2 tp4")
    assert counted(Comm(mesh, 1, MetaTransport(8, 1))) == EXPECTED


def test_sent_bytes_of_a_ring_add_up_to_what_crosses_the_wires():
    def sent(comm):
        counter = Counter()
        seen = Comm(comm.mesh, comm.rank, comm.transport, observers=(counter,))
        sizes = [1, 5, 0, 2]
        seen.all_gather(torch.ones(sizes[comm.rank]), "dp", sizes=sizes)
        seen.reduce_scatter(torch.ones(8), "dp", sizes=sizes)
        return counter.traffic["dp", "all_gather"].sent_bytes, counter.traffic["dp", "reduce_scatter"].sent_bytes

    gathers, scatters = zip(*run_ranks("dp4", sent), strict=True)
    assert sum(gathers) == sum(scatters) == 3 * 8 * FLOAT  # each piece reaches three others


def test_messages_count_at_the_sender():
    def pass_on(comm):
        counter = Counter()
        seen = Comm(comm.mesh, comm.rank, comm.transport, observers=(counter,))
        x = torch.ones(5, dtype=torch.float64)
        seen.send(x, "pp", to=1) if comm.rank == 0 else seen.recv(x, "pp", source=0)
        return counter.traffic

    assert run_ranks("pp2", pass_on) == [{("pp", "send"): Traffic(1, 40, 40)}, {("pp", "recv"): Traffic(1, 40, 0)}]


class Diary:
    def __init__(self):
        self.lines = []

    def started(self, op):
        self.lines.append(("started", op))

    def finished(self, op):
        self.lines.append(("finished", op))


def test_observers_are_told_of_start_and_end_with_one_record():
    def play_two(comm):
        diary = Diary()
        seen = Comm(comm.mesh, comm.rank, comm.transport, observers=(diary,))
        first = seen.start_all_reduce(torch.ones(2), "dp")
        seen.barrier("dp")
        first.wait()
        first.wait()
        return diary.lines

    lines = run_ranks("dp2 tp2", play_two)[3]
    reduce = Operation("all_reduce", "dp", (1, 3), 3, payload_bytes=8, sent_bytes=8)
    barrier = Operation("barrier", "dp", (1, 3), 3, payload_bytes=0, sent_bytes=0)
    assert lines == [("started", reduce), ("started", barrier), ("finished", barrier), ("finished", reduce)]


def test_one_counter_may_serve_all_ranks():
    counter = Counter()

    def add(comm):
        seen = Comm(comm.mesh, comm.rank, comm.transport, observers=(counter,))
        for _ in range(50):
            seen.all_reduce(torch.ones(1), "dp")

    run_ranks("dp8", add)
    assert counter.total() == Traffic(400, 1600, 400 * (2 * 7 * 4 // 8))
