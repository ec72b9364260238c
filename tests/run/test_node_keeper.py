"""The keeper of a node's folder in memory under Slurm: how long the folder lives, and what killed keepers leave."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from weft.errors import EXIT_USER
from weft.run import node_folder, node_keeper
from weft.run.node_folder import KEEPER_VARIABLE, folder_path, open_node_folder
from weft.run.node_keeper import LOCK, main, make_kept_folder, remove_folders_without_keeper

WAIT_S = 30.0


@pytest.fixture
def memory(tmp_path, monkeypatch):
    for module in (node_folder, node_keeper):
        monkeypatch.setattr(module, "MEMORY_FOLDER", tmp_path)
    return tmp_path


def test_the_folder_is_private_and_lives_until_the_job_ends(tmp_path):
    job = {KEEPER_VARIABLE: f"slurm test {os.getpid()}"}
    keeper = subprocess.Popen(
        [sys.executable, "-m", "weft.run.node_keeper"], env={**os.environ, **job}
    )
    try:
        folder = open_node_folder(job, tmp_path / "run")  # waits for the keeper
        assert folder is not None
        assert folder == open_node_folder(job, tmp_path / "run"), "the next start of the ranks"
        assert folder != open_node_folder(job, tmp_path / "other")
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        keeper.send_signal(signal.SIGUSR1)  # asks the ranks to save
        remove_folders_without_keeper()
        assert folder.exists()
        keeper.terminate()
        assert keeper.wait(WAIT_S) == 0
        assert not folder.parent.exists()
    finally:
        keeper.kill()
        keeper.wait()


def test_the_folder_of_a_killed_keeper_is_removed_by_the_next_one(memory):
    lock = make_kept_folder(folder_path("killed"))
    own = make_kept_folder(folder_path("own"))
    (memory / "weft-other").mkdir(mode=0o700)  # of a launcher
    os.close(lock)
    remove_folders_without_keeper()
    os.close(own)
    assert set(memory.iterdir()) == {folder_path("own"), memory / "weft-other"}


def test_a_second_keeper_of_a_job_fails_and_leaves_the_folder_of_the_first(memory, capsys):
    lock = make_kept_folder(folder_path("job"))
    assert main({KEEPER_VARIABLE: "job"}) == 1
    assert capsys.readouterr().err.startswith("warning: no snapshots in memory on this node: ")
    assert [path.name for path in memory.glob("*/*")] == [LOCK]
    os.close(lock)


def test_ranks_go_on_without_a_keeper(memory, monkeypatch, tmp_path):
    monkeypatch.setattr(node_folder, "KEEPER_WAIT_S", 0.0)
    assert open_node_folder({KEEPER_VARIABLE: "job"}, tmp_path / "run") is None
    assert open_node_folder({}, tmp_path / "run") is None
    assert main({}) == EXIT_USER
