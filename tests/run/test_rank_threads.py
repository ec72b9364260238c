"""Ranks as threads: a hung one ends the run by name, with its place and stack; one that waits for a terminal does not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.programs import WEFT, programs
from tests.tiny_run import TINY, write_text
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, RankError
from weft.run.hang import HangDetector
from weft.run.launch import Supervision, launch
from weft.run.process_state import thread_state
from weft.run.rank_setup import open_comm
from weft.run.rank_status import StatusBoard
from weft.run.world import World
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

MESH = Mesh.parse("dp3")
CPU = torch.device("cpu")
TIMEOUT_S = 0.4

RankFunction = Callable[[int], None]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end of a test, so that its hung thread ends."""
    event = threading.Event()
    yield event
    event.set()


def run_hung(before_collective: RankFunction, *, out: Path | None = None) -> RankError:
    """The error of three rank threads that meet in a collective of step 7, after a function."""

    def main(world: World) -> None:
        assert world.attempt is not None
        with open_comm(world, MESH, CPU) as comm:
            world.attempt.status.on_phase(7, "backward")
            world.attempt.status.on_block("layer1")
            before_collective(world.rank)
            comm.all_reduce(torch.ones(4), "dp")

    supervision = Supervision(timeout_s=TIMEOUT_S)
    with pytest.raises(RankError) as caught:
        launch(main, 3, transport="threads", mesh=MESH, out=out, supervision=supervision)
    return caught.value


def test_a_hung_rank_thread_is_named_with_step_phase_collective_and_stack(released, tmp_path):
    def wait_without_end(rank: int) -> None:
        if rank == 1:
            released.wait()

    start_s = time.monotonic()
    text = str(run_hung(wait_without_end, out=tmp_path))
    assert text.startswith("rank 1 (dp1): step 7, backward of layer1: no progress for 0.")
    assert "missing in all_reduce(sum) float32[4] over dp, ranks 0 1 2 [" in text
    stack = (tmp_path / "traceback-rank1.txt").read_text()
    assert stack.startswith("Thread rank 1 (most recent call first):")
    assert "in wait_without_end" in stack
    assert time.monotonic() - start_s < 60.0


def test_an_error_of_a_rank_thread_names_step_and_phase():
    def fail(rank: int) -> None:
        if rank == 2:
            raise ValueError("no such token")

    text = str(run_hung(fail))
    assert text.startswith("rank 2 (dp2): step 7, backward of layer1: ValueError: no such token [")


def test_a_rank_thread_at_a_breakpoint_does_not_hang():
    reader, writer = os.pipe()
    stdin = os.dup(0)
    os.dup2(reader, 0)
    thread = threading.Thread(target=os.read, args=(0, 1))
    thread.start()
    try:
        while not thread_state(thread.native_id).is_held_by_terminal:
            time.sleep(0.001)
        detector = HangDetector(1, timeout_s=TIMEOUT_S)
        for now_s in range(5):
            detector.suspicious([7], now_s=float(now_s))
            detector.discount({0: thread_state(thread.native_id)}, num_running=1)
        assert detector.stalled_s == [0.0]
    finally:
        os.write(writer, b"c")
        thread.join()
        os.dup2(stdin, 0)
        for descriptor in (reader, writer, stdin):
            os.close(descriptor)


def test_the_board_of_rank_threads_can_be_read_while_they_run():
    pids: list[int] = []

    def main(world: World) -> None:
        pids.append(StatusBoard.open(paths[0]).read(world.rank).pid)

    paths: list[Path] = []
    supervision = Supervision(on_board=paths.append)
    assert launch(main, 2, transport="threads", supervision=supervision) == 0
    assert pids == [os.getpid()] * 2
    assert not paths[0].parent.exists()


HANG_IN_STEP_4 = f"""
import time
from weft.train.step import TrainStep
call = TrainStep.__call__

def hang(self, *words, **options):
    if self.model.comm.rank == 1 and hang.num_calls == 3:
        while True:
            time.sleep(60)
    hang.num_calls += self.model.comm.rank == 1
    return call(self, *words, **options)

hang.num_calls = 0
TrainStep.__call__ = hang
{WEFT}
"""


@pytest.mark.slow
def test_a_training_run_with_a_hung_rank_thread_ends_with_code_1_and_one_end_event(tmp_path):
    out = tmp_path / "run"
    words = ("--mesh", "dp2", "--steps", "9", "--run.timeout_s", "2", "--out", str(out))
    source = ("--data.source", str(write_text(tmp_path)))
    done = programs().run(HANG_IN_STEP_4, "train", *TINY, *source, *words)
    assert done.returncode == EXIT_FAILED
    assert done.stderr.startswith("error: rank 1 (dp1): step 4, ")
    assert "no progress for 2." in done.stderr
    *_, end = read_events(out / EVENTS)
    assert end["event"] == "end"
    assert end["status"] == "failed"
    assert "rank 1 (dp1): step 4" in end["error"]
