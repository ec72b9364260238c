"""Ranks whose hosts wait for their devices: which one the hang rule names, and which pauses it takes for what they are."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tests.device import fake_nccl
from tests.device.fake_nccl import FakeNccl, FakeNcclTransport, World
from weft.comm import backends
from weft.comm.comm import Comm
from weft.comm.group import planned_groups
from weft.core.mesh import Mesh
from weft.run.hang import ENDED, MAX_INTERVAL_S, Hang, HangDetector
from weft.run.peer_messages import Answer
from weft.run.process_state import ProcessState
from weft.run.rank_status import Phase, RankStatus, StatusBoard

MESH = Mesh.parse("dp3")
NUM_STEPS = 8
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors travel as CUDA tensors do: a wait for a call returns before the call is complete."""
    monkeypatch.setitem(backends.POLICIES, "cpu", backends.NCCL)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "world", World(), raising=False)
    monkeypatch.setattr(fake_nccl.Work, "wait", lambda work, timeout=None: True)


@dataclass
class DeviceRanks:
    """Three ranks that sum a number in each step and read it; `pause` holds one of them up.

    Attributes:
        paused_rank, paused_phase: where it is held up, in step 7.
        goes_on: ends the pause.
        sums: what rank 0 has read.
    """

    paused_rank: int = 0
    paused_phase: Phase = "data"
    goes_on: threading.Event = field(default_factory=threading.Event)
    sums: list[float] = field(default_factory=list)
    board: StatusBoard = field(default_factory=lambda: StatusBoard.in_memory(MESH.size))

    def train(self, rank: int, comm: Comm, status: RankStatus) -> None:
        comm.checked = False
        for step in range(1, NUM_STEPS + 1):
            for phase in ("data", "forward", "reduce", "update", "save"):
                status.on_phase(step, phase)
                if (step, rank, phase) == (7, self.paused_rank, self.paused_phase):
                    assert self.goes_on.wait(WAIT_S)
                if phase == "reduce":
                    number = comm.start_all_reduce(torch.ones(1), "dp").wait()
                    self.read(number)
            if rank == 0:
                self.sums.append(number.item())
        status.on_phase(NUM_STEPS, "end")

    def read(self, number: torch.Tensor) -> None:
        """What `item()` does on a GPU: the host stops until the device has computed the number."""
        deadline = time.monotonic() + WAIT_S
        while number.item() != MESH.size:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def run(self) -> list[threading.Thread]:
        store = HashStore()

        def run(rank: int) -> None:
            status = self.board.rank(rank)
            status.begin(attempt=0)
            transport = FakeNcclTransport(rank, MESH.size, store, late_after_s=0.2)
            try:
                transport.connect_groups(planned_groups(MESH, rank))
                self.train(rank, Comm(MESH, rank, transport, monitor=status), status)
            finally:
                transport.close()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(MESH.size)]
        for thread in threads:
            thread.start()
        return threads

    def until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def hang_within(self, seconds: float, *, state: str = "S") -> tuple[Hang | None, float]:
        """What the rule finds if the ranks stay as they are, and after how many seconds.

        Args:
            state: of the process of the rank that is held up.
        """
        detector = HangDetector(MESH.size)
        snapshots = [self.board.read(rank) for rank in range(MESH.size)]
        states = {rank: ProcessState("S") for rank in range(MESH.size)}
        states[self.paused_rank] = ProcessState(state)
        now_s = 0.0
        while now_s < seconds:
            now_s += 0.1 if seconds < 100 else MAX_INTERVAL_S
            progress = [self.board.progress(rank) for rank in range(MESH.size)]
            suspicious = detector.suspicious(progress, now_s=now_s)
            detector.discount({rank: states[rank] for rank in suspicious}, num_running=MESH.size)
            hang = detector.find(snapshots)
            if hang is not None:
                return hang, now_s
        return None, seconds

    def are_on_device(self, *ranks: int) -> bool:
        calls = [self.board.read(rank).waiting for rank in ranks]
        return all(call is not None and call.is_on_device for call in calls)


def held_up(ranks: DeviceRanks) -> list[threading.Thread]:
    """Start the ranks, until the others wait for the one that is held up."""
    threads = ranks.run()
    num_complete = 6 if ranks.paused_phase in ("data", "forward") else 7

    def are_where_they_stay() -> bool:
        calls = [ranks.board.read(rank).waiting for rank in range(MESH.size)]
        paused = calls.pop(ranks.paused_rank)
        return paused is None and all(
            call is not None and call.position == num_complete for call in calls
        )

    ranks.until(are_where_they_stay)
    return threads


@pytest.mark.parametrize(
    ("phase", "limit_s"), [("data", 300.0), ("forward", 60.0), ("save", 3600.0)]
)
@pytest.mark.parametrize("paused_rank", [0, 2])
def test_a_rank_that_pauses_is_named_and_not_those_whose_devices_wait_for_it(
    phase: Phase, limit_s: float, paused_rank: int
) -> None:
    """A slow batch and a slow save are waited for; the peers, without progress, are never blamed."""
    ranks = DeviceRanks(paused_rank, phase)
    threads = held_up(ranks)
    hang, after_s = ranks.hang_within(2 * limit_s)
    assert hang is not None
    assert hang.kind == "stuck"
    assert hang.ranks == (paused_rank,)
    assert after_s == pytest.approx(limit_s, abs=1.0)
    assert hang.text.startswith(f"step 7, {phase}: no progress for")
    assert "missing in all_reduce(sum) float32[1] over dp, ranks 0 1 2" in hang.text
    ranks.goes_on.set()
    for thread in threads:
        thread.join()
    assert ranks.sums == [3.0] * NUM_STEPS
    assert all(ranks.board.read(rank).waiting is None for rank in range(MESH.size))


def test_a_stopped_rank_is_named_after_two_seconds() -> None:
    ranks = DeviceRanks(1, "forward")
    threads = held_up(ranks)
    hang, after_s = ranks.hang_within(10.0, state="T")
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("stopped", (1,))
    assert after_s == pytest.approx(2.1, abs=0.15)
    ranks.goes_on.set()
    for thread in threads:
        thread.join()


def test_a_lost_link_is_named_after_five_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have launched a call that does not complete on any device."""
    ranks = DeviceRanks()
    ranks.goes_on.set()
    launch = fake_nccl.Communicator.launch
    is_linked = threading.Event()

    def launch_without_link(
        self: fake_nccl.Communicator, rank: int, kernel: fake_nccl.Kernel
    ) -> None:
        if is_linked.is_set() or len(self.log) <= 7 * MESH.size:
            launch(self, rank, kernel)
        else:
            self.queues.setdefault(rank, deque()).append(kernel)

    monkeypatch.setattr(fake_nccl.Communicator, "launch", launch_without_link)
    threads = ranks.run()
    ranks.until(lambda: ranks.are_on_device(0, 1, 2))
    hang, after_s = ranks.hang_within(60.0)
    assert hang is not None
    assert hang.kind == "stalled"
    assert set(hang.ranks) == {0, 1, 2}
    assert after_s == pytest.approx(2.1, abs=0.3), "steps are short"
    assert "all members have joined, but its device has not completed it for 2.0 s" in hang.text
    is_linked.set()
    with FakeNccl.world.changed:
        for communicator in FakeNccl.world.communicators:
            while communicator._progress():
                pass
    for thread in threads:
        thread.join()


def test_a_call_on_a_device_travels_in_an_answer() -> None:
    """Without a launcher, ranks ask each other."""
    ranks = DeviceRanks(2)
    threads = held_up(ranks)
    snapshot = ranks.board.read(0)
    answer = Answer.of_rank("", snapshot, stalled_s=3.0)
    read = Answer.from_text(answer.to_text())
    assert read == answer
    assert read.waiting is not None
    assert json.loads(answer.to_text())["waiting"]["is_on_device"] is True
    late = Answer.of_rank("", ranks.board.read(2), stalled_s=3.0)
    assert not late.has_joined(read.waiting)
    assert read.has_joined(read.waiting)
    ranks.goes_on.set()
    for thread in threads:
        thread.join()
    assert ENDED not in [ranks.board.progress(rank) for rank in range(MESH.size)]
