"""Processes killed during a save: every acknowledged checkpoint is complete, and no partly written one is used."""

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

from tests.checkpoint.doomed import COLUMNS, ROWS, TENSORS, value_of
from weft.checkpoint.folder import checkpoints, find_newest
from weft.checkpoint.read import open_checkpoint
from weft.core.axes import Box

KEEP = 2
ROOT = Path(__file__).parents[2]


def kill_during_saves(run: Path, kills: int) -> tuple[int, int]:
    """Kill so many savers in a row, each going on where the last one ended.

    Returns the newest step, and how many kills left a half-written checkpoint.
    """
    command = [sys.executable, "-m", "tests.checkpoint.doomed"]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    chance = random.Random(11)
    newest = 0
    torn = 0
    save_s = 0.01
    try:
        for _ in range(kills):
            acknowledged, save_s = one_kill(
                server, run, newest, saves=chance.randrange(3), after_s=chance.random() * save_s
            )
            is_torn = any(path.name.startswith(".tmp-") for path in (run / "ckpt").iterdir())
            torn += is_torn
            newest = check(run, acknowledged)
    finally:
        server.stdin.close()
        server.stdout.close()
        assert server.wait(30) == 0
    return newest, torn


def one_kill(
    server: subprocess.Popen[str], run: Path, newest: int, *, saves: int, after_s: float
) -> tuple[int, float]:
    """Start a saver, hear of `saves` commits, and kill it `after_s` into the next save.

    Returns the last step that it has acknowledged, and how long its last save took, seconds.
    """

    def hear() -> tuple[str, int]:
        word, number = server.stdout.readline().split()
        return word, int(number)

    server.stdin.write(f"{run} {newest + 1}\n")
    server.stdin.flush()
    _, pid = hear()
    save_s = after_s
    for _ in range(saves):
        hear()
        began = time.perf_counter()
        _, newest = hear()
        save_s = time.perf_counter() - began
    hear()
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    while (heard := hear()) != ("dead", 0):
        newest = max(newest, heard[1] if heard[0] == "saved" else 0)
    return newest, save_s


def check(run: Path, acknowledged: int) -> int:
    """The newest is whole and not older than what was acknowledged; so is every other that is
    there.
    """
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
    assert torn > 20, "too few of the kills came in the middle of a save"
