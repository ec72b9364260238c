"""Claims about a process that dies while it saves: what it acknowledged is there, whole, and nothing half-written is taken."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.save.doomed import COLUMNS, ROWS, TENSORS, value_of
from weft.core.axes import Box
from weft.save.folder import checkpoints, find_newest
from weft.save.read import open_checkpoint

KEEP = 2
ROOT = Path(__file__).parents[2]


def kill_during_saves(run: Path, kills: int) -> tuple[int, int]:
    """Kill so many savers in a row, each going on where the last one ended; returns commits seen, temporary folders seen."""
    chance = random.Random(11)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.save.doomed"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    newest, torn = 0, 0
    try:
        for _ in range(kills):
            acknowledged = one_kill(server, run, newest, chance)
            torn += any(path.name.startswith(".tmp-") for path in (run / "ckpt").iterdir())
            newest = check(run, acknowledged)
    finally:
        server.stdin.close()
        server.stdout.close()
        assert server.wait(30) == 0
    return newest, torn


def one_kill(server: subprocess.Popen[str], run: Path, newest: int, chance: random.Random) -> int:
    """The last step that the saver has acknowledged before it was killed, in the middle of whatever it did."""
    server.stdin.write(f"{run} {newest + 1}\n")
    server.stdin.flush()
    pid = int(server.stdout.readline().removeprefix("pid "))
    for _ in range(chance.randrange(3)):
        newest = int(server.stdout.readline())
    time.sleep(chance.random() * 0.02)
    os.kill(pid, signal.SIGKILL)
    while (line := server.stdout.readline()) != "dead\n":
        newest = int(line)
    return newest


def check(run: Path, acknowledged: int) -> int:
    """The newest is whole and not older than what was acknowledged; so is every other that is there."""
    found = find_newest(run)
    assert found.faults == ()
    if found.path is None:
        assert acknowledged == 0
        return 0
    step = found.manifest.facts.step
    assert step in (acknowledged, acknowledged + 1), "committed, but killed before it could say so"
    for number, path in checkpoints(run):
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        for index in range(TENSORS):
            tensor = checkpoint.section("model").read(f"t{index}", Box.whole((ROWS, COLUMNS)))
            assert torch.equal(tensor, torch.full_like(tensor, float(value_of(number, index))))
    assert len(list(checkpoints(run))) <= KEEP + 1
    return step


def test_the_newest_acknowledged_checkpoint_outlives_kills_at_any_moment(tmp_path):
    kill_during_saves(tmp_path, 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_newest_acknowledged_checkpoint_outlives_two_hundred_kills(tmp_path):
    commits, torn = kill_during_saves(tmp_path, 200)
    assert commits > 100
    assert torn > 50, "few of the kills came in the middle of a save"
