"""Claims about local ranks as real processes: whose error is told, with which exit code, and that nobody is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).with_name("scenarios.py")
ENV = {name: value for name, value in os.environ.items() if name != "WEFT_TRACEBACK"}
PATIENCE_S = 30
MOST_S = 2.0
"""From a failure or signal to the end of all: 0.3 s to settle, 1 s of grace for the stubborn, and the end of Python. On
top comes what the start of the same program took, so that busy cores do not count."""


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def left_over(folder: Path, name: str = "*") -> list[int]:
    """Processes that left their id and still live."""
    pids = {int(path.suffix[1:]) for path in folder.glob(f"{name}.[0-9]*")}
    return sorted(pid for pid in pids if lives(pid))


def lives(pid: int) -> bool:
    """Whether it runs; what has ended and waits to be taken from the table does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(folder: Path, name: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.glob(f"{name}.[0-9]*"))) < count:
        assert time.monotonic() < deadline, f"{name} did not come"
        time.sleep(0.01)


@contextmanager
def running(folder: Path, *names: str) -> Iterator[subprocess.Popen[str]]:
    """The scenario program, in a process group of its own like a command in a terminal."""
    command = [sys.executable, str(SCRIPT), str(folder), *names]
    with subprocess.Popen(command, env=ENV, text=True, stdin=-1, stdout=-1, stderr=-1, process_group=0) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


IN_PROCESSES = (
    *("ok", "prepared", "raises", "raises_amid_talk", "killed_amid_talk", "all_raise", "crashes"),
    *("echo_before_cause", "echo_alone", "refuses_to_end", "leaves_things_behind", "says_nothing", "saved"),
)
IN_THREADS = ("ok:threads", "raises_amid_talk:threads")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What became of every scenario, all in one process one after the other; and the folder."""
    folder = tmp_path_factory.mktemp("played")
    port = free_port()
    with running(folder, f"ok:{port}", *IN_PROCESSES, *IN_THREADS) as process:
        out, err = process.communicate("typed by a person", timeout=90)
    assert process.returncode == 0, err
    told = {told["name"]: told for told in map(json.loads, out.splitlines())}
    told["ok:port"] = told.pop(f"ok:{port}")
    return told, folder, err


@pytest.mark.parametrize("name", ["ok", "ok:port", "ok:threads", "prepared", "leaves_things_behind"])
def test_ranks_that_do_their_work_give_0(played, name):
    told = played[0][name]
    assert (told["error"], told["code"]) == (None, 0)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:"),
        ("raises_amid_talk", "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:"),
        ("raises_amid_talk:threads", "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:"),
        ("killed_amid_talk", "rank 2 (pp2): process was killed by SIGKILL (out of memory?)"),
        ("echo_before_cause", "rank 2 (pp2): ValueError: rank 2 cannot go on [scenarios.py:"),
        ("echo_alone", "rank 1 (pp1): CommTimeout: rank 2 did not come [scenarios.py:"),
        ("crashes", "rank 0 (pp0): process was killed by SIGSEGV"),
        ("refuses_to_end", "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:"),
        ("says_nothing", "rank 2 (pp2): process exited with code 3 and no error report"),
    ],
)
def test_only_the_first_failing_ranks_error_is_told_with_its_coordinates(played, name, error):
    told = played[0][name]
    assert told["error"].startswith(error)
    assert told["kind"] == "failure"


def test_nothing_else_reaches_the_screen(played):
    assert played[2] == ""


def test_an_error_that_the_user_can_mend_is_told_once_by_the_first_rank(played):
    told = played[0]["all_raise"]
    assert (told["error"], told["kind"]) == ("rank 2 (pp2): data.source: empty as rank 2 sees it", "user")


def test_tracebacks_go_to_the_run_folder(played):
    folder = played[1]
    assert "ValueError: rank 1 cannot go on" in (folder / "traceback-rank1.txt").read_text()
    assert "string_at" in (folder / "traceback-rank0.txt").read_text(), "where it crashed"
    assert played[0]["raises"]["error"].endswith(f"traceback: {folder}/traceback-rank1.txt")


def test_ranks_that_saved_and_left_give_75(played):
    assert played[0]["saved"]["code"] == 75


@pytest.mark.parametrize(
    "name",
    ["raises", "raises_amid_talk", "killed_amid_talk", "crashes", "refuses_to_end", "raises_amid_talk:threads"],
)
def test_the_others_are_ended_soon(played, name):
    assert played[0][name]["seconds"] < MOST_S + 2 * played[0]["ok"]["seconds"]


def test_no_process_is_left_and_no_thread_in_the_parent(played):
    assert left_over(played[1]) == []
    assert {played[0][name]["threads"] for name in IN_PROCESSES} == {1}, "a parent with threads cannot be forked"


@pytest.mark.parametrize(
    ("scenario", "number", "code"),
    [
        ("waits", signal.SIGINT, 130),
        ("waits_stubbornly", signal.SIGINT, 130),
        ("waits", signal.SIGTERM, 143),
        ("saves_on_sigterm", signal.SIGTERM, 75),
        ("waits_stubbornly", signal.SIGKILL, -9),
    ],
    ids=["ctrl-c", "ctrl-c and stubborn ranks", "sigterm", "sigterm and ranks that save", "the parent is killed"],
)
def test_a_signal_to_the_command_leaves_no_process(tmp_path, scenario, number, code):
    began = time.monotonic()
    with running(tmp_path, scenario) as process:
        wait_for(tmp_path, "waiting", 3)
        start = time.monotonic()
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=PATIENCE_S)
        deadline = time.monotonic() + 1.0
        while left_over(tmp_path, "waiting") and time.monotonic() < deadline:
            time.sleep(0.01)
    assert left_over(tmp_path) == []
    assert time.monotonic() - start < MOST_S + (start - began)
    if code in (75, 143):  # the program goes on: launch returned it
        assert json.loads(out)["code"] == code
    elif code == 130:  # the program saw KeyboardInterrupt, as every Python program does
        assert err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert process.returncode == code


def world_env(rank: int, port: int) -> dict[str, str]:
    return {
        **ENV,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "3",
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS_PER_NODE": "3",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": "1",
        "MASTER_PORT": str(port),
    }


def test_ranks_meet_as_slurm_tasks(tmp_path):
    port = free_port()
    command = [sys.executable, str(SCRIPT), str(tmp_path), "ok"]
    tasks = [subprocess.Popen(command, env=world_env(rank, port), stderr=-1, text=True) for rank in range(3)]
    ends = [(task.communicate(timeout=60)[1], task.returncode) for task in tasks]
    assert ends == [("", 0)] * 3
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["ok0", "ok1", "ok2"]


def torchrun(folder: Path, scenario: str) -> subprocess.CompletedProcess[str]:
    ranks = ["--nproc-per-node", "3", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, str(SCRIPT), str(folder), scenario]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)


def test_ranks_meet_under_torchrun(tmp_path):
    done = torchrun(tmp_path, "ok")
    assert done.returncode == 0, done.stderr
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["ok0", "ok1", "ok2"]


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("raises_amid_talk", "error: rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:"),
        ("all_raise", "error: rank 0 (pp0): data.source: empty as rank 0 sees it"),
    ],
)
def test_one_error_is_told_under_torchrun_too(tmp_path, scenario, error):
    done = torchrun(tmp_path, scenario)
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    assert len(told) == 1
    assert told[0].startswith(error)
