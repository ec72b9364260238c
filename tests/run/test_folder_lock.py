"""Lock of a run folder: one writer, stale locks are found, nothing is damaged."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.tiny_run import TINY
from weft.cli import main
from weft.errors import EXIT_PREEMPTED, EXIT_USER, LaunchError
from weft.run import folder_lock
from weft.run.folder_lock import (
    LOCK,
    STALE_AFTER_S,
    acquire,
    acquire_new,
    find_lock,
    heartbeat,
    held_fault,
    publish_status_board,
)
from weft.run.lock_holder import LockHolder

HOLD = """
import os, sys, time
from pathlib import Path
from weft.run.folder_lock import acquire
with acquire(Path(sys.argv[1])):
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(float(sys.argv[3]))
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""
OTHER_MACHINE = replace(
    LockHolder.this_process(), host="node7", machine="another", pid=1, job="slurm 7.0"
)


def killed_holder(out: Path, *words: str) -> None:
    """Lock the folder in another process, and kill it."""
    command = [sys.executable, "-c", HOLD, str(out), *(words or ("alone", "0"))]
    with subprocess.Popen(command, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match=f"process {process.pid} on "):
            acquire(out)
        process.send_signal(signal.SIGKILL)


def write_lock(out: Path, holder: LockHolder | None, *, age_s: float = 0.0) -> None:
    out.mkdir(exist_ok=True)
    text = "" if holder is None else json.dumps(asdict(holder))
    (out / LOCK).write_text(text)
    at_s = time.time() - age_s
    os.utime(out / LOCK, (at_s, at_s))


def race(start: Callable[[int], object], num_threads: int = 8) -> list[object]:
    """Call `start` in threads at the same time; results, or the LaunchErrors they raised."""
    barrier = threading.Barrier(num_threads)
    results: list[object] = []

    def run(index: int) -> None:
        barrier.wait()
        try:
            results.append(start(index))
        except LaunchError as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(params=["flock", "no flock", "no link"])
def file_system(request, monkeypatch):
    """What the file system of the run folder has."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if request.param == "no flock":
        monkeypatch.setattr(folder_lock, "_flock", lambda _: None)
    if request.param == "no link":
        monkeypatch.setattr(os, "link", refuse)
    return request.param


def test_a_lock_names_its_process_and_is_removed_at_the_end(tmp_path, file_system):
    out = tmp_path / "runs" / "x"
    with acquire(out, job="slurm 7.0"):
        found = find_lock(out)
        assert found is not None
        assert found.state() == "held"
        assert found.holder.pid == os.getpid()
        assert found.holder.job == "slurm 7.0"
        publish_status_board(out, tmp_path / "board")
        assert find_lock(out).holder.status_board == str(tmp_path / "board")
        (out / "events.jsonl").touch()
    assert [path.name for path in out.iterdir()] == ["events.jsonl"]


def test_a_start_that_failed_leaves_no_empty_folder(tmp_path):
    with acquire(tmp_path / "x"):
        pass
    assert not (tmp_path / "x").exists()


def test_a_second_writer_is_rejected_and_changes_nothing(tmp_path, file_system):
    with acquire(tmp_path / "x"):
        before = (tmp_path / "x" / LOCK).read_text()
        with pytest.raises(LaunchError, match="another run writes into") as error:
            acquire(tmp_path / "x")
        assert str(error.value) == str(held_fault(tmp_path / "x"))
        assert str(error.value).endswith(f"if it has ended: rm {tmp_path}/x/run.lock")
        assert (tmp_path / "x" / LOCK).read_text() == before
        assert len(list((tmp_path / "x").iterdir())) == 1


def test_weft_train_rejects_a_second_writer_before_anything_starts(tmp_path, capsys):
    out = tmp_path / "x"
    with acquire(out):
        for words in (("--out", str(out)), ("--out", str(out), "--resume", "auto")):
            assert main(["train", *TINY, *words]) == EXIT_USER
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"error: out: another run writes into {out} (got process ")
        assert [path.name for path in out.iterdir()] == [LOCK]


def test_the_lock_of_a_killed_process_is_stale(tmp_path):
    killed_holder(tmp_path / "x")
    with acquire(tmp_path / "x") as held:
        assert find_lock(tmp_path / "x").holder == held.holder


def test_ranks_of_a_killed_launcher_are_waited_for(tmp_path, monkeypatch):
    killed_holder(tmp_path / "x", "fork", "1.0")
    monkeypatch.setattr(folder_lock, "END_WAIT_S", 0.1)
    with pytest.raises(LaunchError, match="another run writes into"):
        acquire(tmp_path / "x")
    monkeypatch.setattr(folder_lock, "END_WAIT_S", 5.0)
    with acquire(tmp_path / "x"):
        pass


def test_a_reused_process_id_does_not_keep_a_lock(tmp_path):
    mine = LockHolder.this_process()
    holder = replace(mine, process_start=mine.process_start - 1)
    write_lock(tmp_path / "x", holder)
    with acquire(tmp_path / "x"):
        found = find_lock(tmp_path / "x")
        assert found.holder.process_start == mine.process_start


@pytest.mark.parametrize("holder", [OTHER_MACHINE, None], ids=["other machine", "unreadable"])
def test_other_locks_are_stale_when_their_heartbeat_is_old(tmp_path, file_system, holder):
    write_lock(tmp_path / "x", holder, age_s=STALE_AFTER_S / 2)
    with pytest.raises(LaunchError, match=r"150 s ago.*rm .*run\.lock"):
        acquire(tmp_path / "x", job="slurm 8.0")
    write_lock(tmp_path / "x", holder, age_s=STALE_AFTER_S + 5)
    with acquire(tmp_path / "x"):
        pass


def other_container() -> LockHolder:
    """A holder in another pid namespace of this kernel, written a moment ago."""
    mine = LockHolder.this_process()
    boot, _ = mine.machine.split(" ")
    return replace(mine, machine=f"{boot} pid:[1]", pid=7)


def test_a_killed_container_that_is_started_again_has_the_folder_at_once(tmp_path):
    write_lock(tmp_path / "x", other_container())
    assert held_fault(tmp_path / "x") is None
    with acquire(tmp_path / "x") as held:
        assert find_lock(tmp_path / "x").holder == held.holder


def test_a_container_that_still_runs_keeps_the_folder_and_the_exit_code_is_75(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(folder_lock, "END_WAIT_S", 0.1)
    write_lock(tmp_path / "x", other_container())
    with (tmp_path / "x" / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["train", *TINY, "--out", str(tmp_path / "x")]) == EXIT_PREEMPTED
    assert ", in another container; need one writer)" in capsys.readouterr().err
    assert main(["train", *TINY, "--out", str(tmp_path / "x"), "--steps", "-1"]) == EXIT_USER


def test_a_restart_of_the_same_job_on_another_machine_takes_the_lock(tmp_path):
    write_lock(tmp_path / "x", OTHER_MACHINE)
    assert held_fault(tmp_path / "x", job="slurm 7.0") is None
    with acquire(tmp_path / "x", job="slurm 7.0"):
        pass


def test_one_of_several_processes_takes_a_stale_lock(tmp_path, file_system):
    for number in range(8):
        out = tmp_path / str(number)
        write_lock(out, OTHER_MACHINE, age_s=2 * STALE_AFTER_S)
        results = race(lambda _, out=out: acquire(out))
        locks = [result for result in results if not isinstance(result, LaunchError)]
        assert len(locks) == 1
        assert find_lock(out).holder == locks[0].holder
        assert [path.name for path in out.iterdir()] == [LOCK]


def test_new_folders_of_starts_at_the_same_time_differ(tmp_path):
    results = race(lambda _: acquire_new(tmp_path / "runs" / "x")[0])
    assert len(set(results)) == 8
    assert tmp_path / "runs" / "x" in results


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_a_lock_that_is_no_regular_file_is_one_line(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("keep")
    out = tmp_path / "x"
    out.mkdir()
    if kind == "link":
        (out / LOCK).symlink_to(victim)
    elif kind == "folder":
        (out / LOCK).mkdir()
    else:
        os.mkfifo(out / LOCK)
    with pytest.raises(LaunchError, match="out: has an unusable lock file"):
        acquire(out)
    assert str(held_fault(out)).startswith("out: has an unusable lock file")
    assert victim.read_text() == "keep"


def test_the_heartbeat_renews_the_modification_time(tmp_path):
    write_lock(tmp_path, OTHER_MACHINE, age_s=1000)
    with heartbeat(tmp_path, every_s=0.01):
        deadline = time.monotonic() + 10
        while find_lock(tmp_path).age_s > 500:
            assert time.monotonic() < deadline
            time.sleep(0.01)
