"""Local ranks as real processes: the error that is raised, the exit code, and no process left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.programs import Program, programs

SCRIPT = Path(__file__).with_name("scenarios.py")
ENV = {name: value for name, value in os.environ.items() if name != "WEFT_TRACEBACK"}
PATIENCE_S = 30
MAX_END_S = 2.0
"""From a failure or signal to the end of all: 0.3 s to settle, 1 s of grace for ranks that ignore
SIGTERM, and the exit of Python."""
STARTS = 8
"""The time of so many starts of the same program (0.25 s each on idle cores) is added, so that busy
cores do not count."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def remaining(folder: Path, name: str = "*") -> list[int]:
    """Processes that recorded their id and still run."""
    pids = set()
    for path in folder.glob(f"{name}.[0-9]*"):
        pids.add(int(path.suffix[1:]))
    return sorted(pid for pid in pids if is_running(pid))


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(folder: Path, name: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.glob(f"{name}.[0-9]*"))) < count:
        assert time.monotonic() < deadline, f"no file {name}"
        time.sleep(0.01)


@contextmanager
def running(folder: Path, *names: str, text: str = "") -> Iterator[Program]:
    """The scenario program, in a process group of its own like a command in a terminal."""
    words = (str(folder), *names)
    with programs().running("", *words, script=SCRIPT, environ=ENV, text=text) as process:
        yield process


IN_PROCESSES = (
    "ok",
    "exits_by_python",
    "prepared",
    "raises",
    "raises_during_collectives",
    "killed_during_collectives",
    "all_raise",
    "crashes",
    "secondary_failure_before_cause",
    "secondary_failure_only",
    "ignores_sigterm",
    "leaves_a_process",
    "exits_without_report",
    "saved",
)
PATIENT = ("raises_during_collectives:patient", "reports_early:patient")
"""Where the time for reports of other ranks is a minute."""
RESTARTED = "loses_its_folder:restarts"
IN_THREADS = ("ok:threads", "exits_by_python:threads", "raises_during_collectives:threads")


@dataclass(frozen=True)
class Played:
    """Outcomes by scenario, the folder of the ranks, and what was printed to stderr."""

    outcomes: dict[str, dict[str, Any]]
    folder: Path
    stderr: str


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """All scenarios, one after the other in one process."""
    folder = tmp_path_factory.mktemp("played")
    port = free_port()
    names = (f"listens:{port}", f"ok:{port}", *IN_PROCESSES, *PATIENT, RESTARTED, *IN_THREADS)
    with running(folder, *names, text="typed by a user") as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    outcomes = {}
    for line in out.splitlines():
        outcome = json.loads(line)
        outcomes[outcome["name"].replace(f"ok:{port}", "ok:port")] = outcome
    return Played(outcomes, folder, err)


@pytest.mark.parametrize("name", ["ok", "ok:port", "ok:threads", "prepared", "leaves_a_process"])
def test_ranks_that_return_give_exit_code_0(played, name):
    outcome = played.outcomes[name]
    assert outcome["error"] is None
    assert outcome["code"] == 0


def test_local_ranks_listen_on_loopback_only_with_a_port_too(played):
    addresses = {}
    for rank in range(3):
        text = (played.folder / f"listens{rank}.json").read_text()
        addresses[rank] = json.loads(text)
    assert {ip for found in addresses.values() for ip, _ in found} == {"127.0.0.1"}
    assert len(addresses[0]) == len(addresses[1]) + 1, "the store, on rank 0 only"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:"),
        (
            "raises_during_collectives",
            "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:",
        ),
        (
            "raises_during_collectives:threads",
            "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:",
        ),
        (
            "killed_during_collectives",
            "rank 2 (pp2): process was killed by SIGKILL (out of memory?)",
        ),
        (
            "secondary_failure_before_cause",
            "rank 2 (pp2): ValueError: rank 2 cannot go on [scenarios.py:",
        ),
        ("secondary_failure_only", "rank 1 (pp1): CommTimeout: rank 2 did not come [scenarios.py:"),
        ("crashes", "rank 0 (pp0): process was killed by SIGSEGV"),
        ("ignores_sigterm", "rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:"),
        (
            "exits_without_report",
            "rank 2 (pp2): process exited with code 0 before its function returned",
        ),
        ("exits_by_python", "rank 1 (pp1): SystemExit: 0 [scenarios.py:"),
        ("exits_by_python:threads", "rank 1 (pp1): SystemExit: 0 [scenarios.py:"),
    ],
)
def test_the_error_is_the_root_cause_with_its_coordinates(played, name, error):
    outcome = played.outcomes[name]
    assert outcome["error"].startswith(error)
    assert outcome["kind"] == "failure"


def test_ranks_are_started_again_after_their_temporary_folder_was_removed(played):
    outcome = played.outcomes[RESTARTED]
    assert (outcome["code"], outcome["error"]) == (0, None)


def test_nothing_is_printed_besides(played):
    assert played.stderr == ""


def test_a_user_error_of_all_ranks_is_reported_once_by_the_first(played):
    outcome = played.outcomes["all_raise"]
    assert outcome["error"] == "rank 2 (pp2): data.source: empty on rank 2"
    assert outcome["kind"] == "user"


def test_tracebacks_are_written_to_the_run_folder(played):
    folder = played.folder
    assert "ValueError: rank 1 cannot go on" in (folder / "traceback-rank1.txt").read_text()
    assert "string_at" in (folder / "traceback-rank0.txt").read_text(), "where it crashed"
    assert played.outcomes["raises"]["error"].endswith(f"traceback: {folder}/traceback-rank1.txt")


def test_ranks_that_saved_and_stopped_give_exit_code_75(played):
    assert played.outcomes["saved"]["code"] == 75


@pytest.mark.parametrize(
    "name",
    [
        "raises",
        "raises_during_collectives",
        "killed_during_collectives",
        "crashes",
        "ignores_sigterm",
        "raises_during_collectives:threads",
    ],
)
def test_the_other_ranks_are_ended_soon_after_a_failure(played, name):
    start_s = played.outcomes["ok"]["seconds"]
    assert played.outcomes[name]["seconds"] < MAX_END_S + 2 * start_s


@pytest.mark.parametrize("name", PATIENT)
def test_an_error_that_a_rank_reports_is_known_at_once(played, name):
    outcome = played.outcomes[name]
    assert outcome["error"].startswith("rank 1 (pp1): ValueError: rank 1 cannot go on")
    assert outcome["seconds"] < MAX_END_S + 2 * played.outcomes["ok"]["seconds"]


def test_no_process_is_left_and_no_thread_in_the_parent(played):
    assert remaining(played.folder) == []
    num_threads = {played.outcomes[name]["num_threads"] for name in IN_PROCESSES}
    assert num_threads == {1}, "a parent with threads cannot be forked"


@pytest.mark.parametrize(
    ("scenario", "number", "code"),
    [
        ("waits", signal.SIGINT, 130),
        ("waits_ignoring_signals", signal.SIGINT, 130),
        ("waits", signal.SIGTERM, 143),
        ("saves_on_sigterm", signal.SIGTERM, 75),
        ("waits_ignoring_signals", signal.SIGKILL, -9),
    ],
    ids=[
        "ctrl-c",
        "ctrl-c ignored by ranks",
        "sigterm",
        "sigterm and ranks that save",
        "sigkill of the parent",
    ],
)
def test_a_signal_to_the_command_leaves_no_process(tmp_path, scenario, number, code):
    began = time.monotonic()
    with running(tmp_path, scenario) as process:
        wait_for(tmp_path, "waiting", 3)
        start = time.monotonic()
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=PATIENCE_S)
        deadline = time.monotonic() + 1.0
        while remaining(tmp_path, "waiting") and time.monotonic() < deadline:
            time.sleep(0.01)
    assert remaining(tmp_path) == []
    assert time.monotonic() - start < MAX_END_S + STARTS * (start - began)
    if code in (75, 143):  # the program goes on: launch returned it
        assert json.loads(out)["code"] == code
    elif code == 130:  # the program saw KeyboardInterrupt, as every Python program does
        assert err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert process.returncode == code


def test_a_second_sigterm_kills_ranks_that_ignore_the_first(tmp_path):
    with running(tmp_path, "waits_ignoring_signals") as process:
        wait_for(tmp_path, "waiting", 3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert len(remaining(tmp_path, "waiting")) == 3
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out)["code"] == 143
    assert remaining(tmp_path) == []


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


def test_ranks_connect_as_slurm_tasks(tmp_path):
    port = free_port()
    with ExitStack() as stack:
        tasks = []
        for rank in range(3):
            task = programs().running(
                "", str(tmp_path), "ok", script=SCRIPT, environ=world_env(rank, port)
            )
            tasks.append(stack.enter_context(task))
        ends = [(task.communicate(timeout=60)[1], task.wait()) for task in tasks]
    assert ends == [("", 0)] * 3
    stems = sorted(path.stem for path in tmp_path.iterdir())
    assert stems == ["ok0", "ok1", "ok2"]


def torchrun(folder: Path, scenario: str) -> subprocess.CompletedProcess[str]:
    ranks = ["--nproc-per-node", "3", "--master-port", str(free_port())]
    words = (*ranks, str(SCRIPT), str(folder), scenario)
    return programs().run("", *words, module="torch.distributed.run", environ=ENV)


@pytest.mark.slow  # test_torchrun.py trains under torchrun in `make test`
def test_ranks_connect_under_torchrun(tmp_path):
    done = torchrun(tmp_path, "ok")
    assert done.returncode == 0, done.stderr
    stems = sorted(path.stem for path in tmp_path.iterdir())
    assert stems == ["ok0", "ok1", "ok2"]


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        (
            "raises_during_collectives",
            "error: rank 1 (pp1): ValueError: rank 1 cannot go on [scenarios.py:",
        ),
        pytest.param(
            "all_raise", "error: rank 0 (pp0): data.source: empty on rank 0", marks=pytest.mark.slow
        ),
    ],
)
def test_one_error_is_printed_under_torchrun(tmp_path, scenario, error):
    done = torchrun(tmp_path, scenario)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    assert len(errors) == 1
    assert errors[0].startswith(error)
