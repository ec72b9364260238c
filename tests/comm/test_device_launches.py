"""Calls under the policy of NCCL, on a recording backend: native operations, launched by the caller, in program order."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from weft.comm import backends
from weft.comm.backends import ABORT_TAG, DeviceGroup, policy_of
from weft.comm.collectives import all_gather, all_reduce_, recv, reduce_scatter, send
from weft.comm.comm import Comm
from weft.comm.group import Group
from weft.comm.group_queue import GroupQueue, ProcessGroupBackend
from weft.comm.in_flight import GroupWatch
from weft.comm.transport import Call, MetaTransport
from weft.comm.world_store import PresenceStore
from weft.core.mesh import Mesh
from weft.errors import CommError, CommTimeout, MismatchError

GROUP = Group("dp", (0, 1, 2, 3), 1, checked=False)


@dataclass
class Done:
    """A work; complete unless it hangs."""

    hangs: bool = False

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return not self.hangs


@dataclass
class Recorded:
    """A process group that notes what is launched, and in which thread."""

    calls: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    sum_of_digests: int = 4
    hangs: bool = False
    is_aborted: bool = False

    def _note(self, name: str) -> Done:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        return Done(self.hangs)

    def allreduce(self, tensors: list[Tensor], op: object) -> Done:
        if tensors[0].dtype == torch.int64:
            tensors[0][0] *= self.sum_of_digests
            tensors[0][1] = 0
            return self._note("digest")
        return self._note("allreduce")

    def _allgather_base(self, out: Tensor, x: Tensor) -> Done:
        return self._note("allgather")

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, options: object) -> Done:
        return self._note("reduce_scatter")

    def alltoall_base(self, out: Tensor, x: Tensor, *sizes: list[int]) -> Done:
        return self._note("alltoall")

    def _start_coalescing(self) -> None:
        self.calls.append("start group")

    def _end_coalescing(self) -> Done:
        return self._note("end group")

    def send(self, xs: list[Tensor], to: int, tag: int) -> Done:
        return self._note(f"send {to}")

    def recv(self, xs: list[Tensor], source: int, tag: int) -> Done:
        self.is_aborted = tag == ABORT_TAG  # how a group of CPU tensors is closed
        return self._note(f"recv {source}")

    def abort(self) -> None:
        """Of a group on a device."""

    def shutdown(self) -> None:
        """Of a group on a device."""


@pytest.fixture
def nccl(monkeypatch):
    """CPU tensors travel as CUDA tensors do."""
    monkeypatch.setitem(backends.POLICIES, "cpu", backends.NCCL)


def make_queue(group: Recorded, *, deterministic: bool = False, timeout_s: float = 60.0):
    presence = PresenceStore(HashStore())
    watch = GroupWatch(
        "group", presence, timeout_s=timeout_s, late_after_s=timeout_s, announce_after_s=0.0
    )
    return GroupQueue(backend_of(group, deterministic=deterministic), watch)


def backend_of(group: Recorded, *, deterministic: bool = False) -> ProcessGroupBackend:
    return ProcessGroupBackend(
        lambda device_type, call: carrier_of(group, device_type, deterministic=deterministic)
    )


def carrier_of(group: Recorded, device_type: str, *, deterministic: bool = False) -> DeviceGroup:
    policy = policy_of(device_type, deterministic=deterministic)
    return DeviceGroup(group, policy, {"sum": "sum"}, {"sum": "options"})


def calls_of(axis_group: Group) -> list[Call]:
    x = torch.ones(8)
    lowered = (
        all_reduce_(x, axis_group, "sum"),
        reduce_scatter(x, axis_group, 0, "sum", None),
        all_gather(x, axis_group, 0, None),
    )
    return [each.call for each in lowered]


def no_report(*args: object) -> None:
    """Do nothing."""


@pytest.mark.usefixtures("nccl")
def test_native_operations_in_program_order_from_the_calling_thread():
    group = Recorded()
    queue = make_queue(group)
    for call in calls_of(GROUP):
        queue.start(call, no_report).wait()
    assert group.calls == ["allreduce", "reduce_scatter", "allgather"]
    assert group.threads == {threading.get_ident()}


@pytest.mark.usefixtures("nccl")
def test_deterministic_reductions_exchange_and_add_in_rank_order():
    group = Recorded()
    queue = make_queue(group, deterministic=True)
    for call in calls_of(GROUP):
        queue.start(call, no_report).wait()
    assert group.calls == ["alltoall", "alltoall", "allgather"]


@pytest.mark.usefixtures("nccl")
def test_checked_calls_are_launched_at_once_behind_their_digest():
    group = Recorded()
    queue = make_queue(group)
    checked = Group("dp", (0, 1, 2, 3), 1, checked=True)
    started = [queue.start(call, no_report) for call in calls_of(checked)]
    assert group.calls == ["digest", "allreduce", "digest", "reduce_scatter", "digest", "allgather"]
    assert group.threads == {threading.get_ident()}
    del started


@pytest.mark.usefixtures("nccl")
def test_a_digest_that_differs_is_an_error_of_wait(monkeypatch):
    group = Recorded(sum_of_digests=5)
    queue = make_queue(group)

    def exchange(backend: ProcessGroupBackend, call: Call) -> None:
        raise MismatchError("texts differ")

    monkeypatch.setattr(ProcessGroupBackend, "_exchange_texts", exchange)
    checked = Group("dp", (0, 1, 2, 3), 1, checked=True)
    started = queue.start(calls_of(checked)[0], no_report)
    with pytest.raises(MismatchError):
        started.wait()


@pytest.mark.usefixtures("nccl")
def test_messages_are_launched_together_and_not_compared():
    group = Recorded()
    queue = make_queue(group)
    axis_group = Group("pp", (0, 1, 2), 1, checked=True)
    calls = [
        send(torch.ones(4), axis_group, 2).call,
        recv(torch.ones(4), axis_group, 0).call,
        send(torch.ones(4), axis_group, 2).call,
    ]
    queue.launch_held([queue.hold(call, no_report) for call in calls])
    first, second = ["start group", "send 2", "recv 0", "end group"], "send 2"
    assert group.calls == [*first, "start group", second, "end group"]


@pytest.mark.usefixtures("nccl")
def test_a_message_alone_travels_on_the_group_of_its_axis():
    group = Recorded()
    queue = make_queue(group)
    axis_group = Group("pp", (4, 5, 6), 1, checked=False)
    queue.start(send(torch.ones(4), axis_group, 2).call, no_report)
    assert group.calls == ["start group", "send 2", "end group"]


@pytest.mark.usefixtures("nccl")
def test_the_oldest_unfinished_call_is_reported_and_the_group_aborted():
    group = Recorded(hangs=True)
    queue = make_queue(group, timeout_s=0.0)
    queue.start(calls_of(GROUP)[0], no_report).wait()
    queue.check_progress()
    assert group.is_aborted
    with pytest.raises(CommError, match="after an earlier failure: all_reduce") as caught:
        queue.start(calls_of(GROUP)[0], no_report)
    assert "did not arrive within 0 s" in str(caught.value)
    assert not isinstance(caught.value, CommTimeout)


def test_calls_on_the_cpu_keep_their_order_of_summation():
    group = Recorded()
    queue = make_queue(group)
    for call in calls_of(GROUP):
        queue.start(call, no_report).wait()
    assert group.calls == ["alltoall"] * 3


@pytest.mark.usefixtures("nccl")
def test_digests_that_differ_are_an_error_also_without_the_texts(monkeypatch):
    queue = make_queue(Recorded(sum_of_digests=5))
    monkeypatch.setattr(ProcessGroupBackend, "_exchange_texts", lambda backend, call: Done())
    checked = Group("dp", (0, 1, 2, 3), 1, checked=True)
    started = queue.start(calls_of(checked)[0], no_report)
    with pytest.raises(MismatchError, match=r"this rank called all_reduce\(sum\)"):
        started.wait()


@pytest.mark.usefixtures("nccl")
def test_a_call_that_blocks_in_its_launch_is_reported_and_aborted():
    group = Recorded()
    may_go_on = threading.Event()
    is_launching = threading.Event()

    def blocked_launch(tensors: list[Tensor], op: object) -> Done:
        is_launching.set()
        may_go_on.wait(60)
        return Done()

    def recv_of_abort(xs: list[Tensor], source: int, tag: int) -> Done:
        assert tag == ABORT_TAG  # how a group of CPU tensors is closed
        may_go_on.set()
        return Done()

    group.allreduce = blocked_launch
    group.recv = recv_of_abort
    queue = make_queue(group, timeout_s=0.0)
    thread = threading.Thread(target=queue.start, args=(calls_of(GROUP)[0], no_report))
    thread.start()
    assert is_launching.wait(60)
    queue.check_progress()
    assert may_go_on.is_set()
    thread.join(60)
    assert isinstance(queue.watch.failure, CommTimeout)


@pytest.mark.usefixtures("nccl")
def test_what_an_aborted_call_wrote_is_not_handed_on():
    queue = make_queue(Recorded(hangs=True), timeout_s=0.0)
    started = queue.start(calls_of(GROUP)[0], no_report)
    queue.check_progress()
    with pytest.raises(CommError, match="after an earlier failure: all_reduce"):
        started.wait()


@pytest.mark.usefixtures("nccl")
def test_an_aborted_comparison_is_no_comparison():
    queue = make_queue(Recorded(hangs=True, sum_of_digests=5), timeout_s=0.0)
    checked = Group("dp", (0, 1, 2, 3), 1, checked=True)
    started = queue.start(calls_of(checked)[0], no_report)
    queue.check_progress()
    with pytest.raises(CommError, match="after an earlier failure"):
        started.wait()


def test_the_host_rejects_numbers_that_it_reads_after_an_abort():
    class Aborted(MetaTransport):
        failure = CommTimeout("all_reduce: rank 1 did not arrive within 1 s")

    comm = Comm(Mesh.parse("dp2"), 0, Aborted(2, 0, device="cpu"))
    with pytest.raises(CommTimeout, match="rank 1 did not arrive"):
        comm.check_connections()
    Comm(Mesh.parse("dp2"), 0, MetaTransport(2, 0)).check_connections()


def test_a_cpu_call_on_a_group_of_a_device_connects_in_the_worker():
    """Connecting blocks until all members come, and the caller must not wait for that."""
    may_connect = threading.Event()
    group = Recorded()

    def connect(device_type: str, call: Call) -> DeviceGroup:
        if device_type == "cpu":
            assert may_connect.wait(60)
        return carrier_of(group, device_type)

    queue = make_queue(group)
    queue.backend = ProcessGroupBackend(connect)
    queue.connect(calls_of(GROUP)[0], "cuda")
    started = queue.start(calls_of(GROUP)[0], no_report)
    assert not started.is_completed()
    may_connect.set()
    started.wait()
    assert group.calls == ["alltoall"]


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(("hangs", "ended"), [(False, ["shutdown"]), (True, [])])
def test_communicators_are_ended_together_once_their_calls_are_complete(hangs, ended):
    group = Recorded(hangs=hangs)
    calls: list[str] = []
    group.shutdown = lambda: calls.append("shutdown")
    queue = make_queue(group)
    queue.connect(calls_of(GROUP)[0], "cuda")
    queue.start(calls_of(GROUP)[0], no_report)
    queue.shut_down()
    assert calls == ended
