"""Recovery from killed and stopped ranks: the run continues automatically with the bits of a run without faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.supervised import (
    final_state,
    finish,
    numbers,
    send_signal,
    training,
    wait_for_rank,
    words_of,
)
from weft.errors import EXIT_OK, EXIT_USER
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

DP3 = ("--mesh", "dp3", "--parallel.zero", "3", "--batch.global_size", "6")
PP2_TP2 = ("--mesh", "pp2 tp2", "--batch.global_size", "4")
NUM_STEPS = 24

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Layout -> the folder of a run without faults."""

    @cache
    def run_once(layout: tuple[str, ...]) -> Path:
        out = tmp_path_factory.mktemp("clean") / "run"
        words = words_of(layout, steps=NUM_STEPS, save__every=6, save__memory_every=2)
        with training(out, *words) as process:
            assert finish(process)[0] == EXIT_OK
        return out

    return run_once


def restarts(out: Path) -> list[dict[str, Any]]:
    events = list(read_events(out / EVENTS))
    assert events[-1]["event"] == "end"
    assert [event["event"] for event in events].count("end") == 1
    return [event for event in events if event["event"] == "restart"]


@pytest.mark.parametrize(
    ("layout", "memory_every", "number", "sources"),
    [
        (DP3, 2, signal.SIGKILL, ("memory",)),
        pytest.param(DP3, 0, signal.SIGKILL, ("checkpoint", "start"), marks=pytest.mark.slow),
        (DP3, 2, signal.SIGSTOP, ("memory",)),
        pytest.param(PP2_TP2, 2, signal.SIGSTOP, ("memory",), marks=pytest.mark.slow),
        pytest.param(PP2_TP2, 0, signal.SIGKILL, ("checkpoint", "start"), marks=pytest.mark.slow),
    ],
    ids=[
        "dp3-zero3-killed-memory",
        "dp3-zero3-killed-disk",
        "dp3-zero3-stopped-memory",
        "pp2-tp2-stopped-memory",
        "pp2-tp2-killed-disk",
    ],
)
def test_a_run_with_a_fault_ends_with_the_bits_of_one_without(
    clean, tmp_path, layout, memory_every, number, sources
):
    out = tmp_path / "run"
    words = words_of(layout, steps=NUM_STEPS, save__every=6, save__memory_every=memory_every)
    with training(out, *words) as process:
        hit = send_signal(out, 1, number, step=11)
        code, stdout, stderr = finish(process)
    assert (code, stderr) == (EXIT_OK, "")
    assert numbers(out) == numbers(clean(layout))
    assert final_state(out) == final_state(clean(layout))
    (restart,) = restarts(out)
    assert restart["rank"] == 1
    assert restart["source"] in sources
    assert restart["step"] < hit.step + 5
    what = "killed by SIGKILL" if number == signal.SIGKILL else "stopped (SIGSTOP) for 2."
    assert what in restart["reason"]
    assert restart["reason"].startswith("rank 1 (")
    assert f"{restart['reason']}. Restart 1 of 3 from " in stdout


def test_a_rank_killed_at_the_start_is_started_again(clean, tmp_path):
    out = tmp_path / "run"
    words = words_of(DP3, steps=NUM_STEPS, save__every=6, save__memory_every=2)
    with training(out, *words) as process:
        rank = wait_for_rank(out, 2, lambda found: found.phase == "start")
        os.kill(rank.pid, signal.SIGKILL)
        assert finish(process)[0] == EXIT_OK
    assert numbers(out) == numbers(clean(DP3))
    (restart,) = restarts(out)
    assert restart["source"] == "start"
    assert restart["step"] == 0
    assert restart["rank"] == 2


def test_ranks_are_not_started_again_on_data_that_were_replaced(tmp_path):
    out = tmp_path / "run"
    words = words_of(("--mesh", "dp2"), steps=900, save__memory_every=0)
    with training(out, *words) as process:
        hit = wait_for_rank(out, 1, lambda found: found.step >= 2)
        text = tmp_path / "text.txt"
        new = tmp_path / "new.txt"
        new.write_text(text.read_text().swapcase())
        new.rename(text)
        os.kill(hit.pid, signal.SIGKILL)
        code, _, stderr = finish(process)
    assert code == EXIT_USER
    error = f"data.source: {text} has changed since the run started (got another content)"
    assert stderr.startswith(f"error: {error}. Fix: put the file back and resume")
    assert stderr.count("\n") == 1
    *_, end = read_events(out / EVENTS)
    assert (end["event"], end["status"]) == ("end", "failed")
    assert error in end["error"]


FLIP_ONE_BIT = """
import sys
from pathlib import Path
import torch
from weft.train.digest import StateDigests
compare = StateDigests.compare
marker = Path(sys.argv[-1])

def compare_once_spoiled(self, step):
    if step == 9 and self.comm.rank == 2 and not marker.exists():
        marker.touch()
        weight = self.state.model.params["layer0.attn.q.weight"].detach()
        weight.view(torch.int32).view(-1)[5] ^= 1 << 20
    return compare(self, step)

StateDigests.compare = compare_once_spoiled
from weft.cli import main
sys.exit(main(sys.argv[1:-1]))
"""


def test_a_flipped_bit_restarts_the_run_from_a_state_without_it(tmp_path):
    layout = ("--mesh", "dp3", "--batch.global_size", "6")
    options = {"save__every": 4, "save__memory_every": 1, "guard__digest_every": 3}
    words = words_of(layout, steps=12, **options)
    clean_out = tmp_path / "clean"
    out = tmp_path / "run"
    with training(clean_out, *words) as process:
        assert finish(process)[0] == EXIT_OK
    with training(out, *words, str(tmp_path / "flipped"), program=FLIP_ONE_BIT) as process:
        code, stdout, stderr = finish(process)
    assert (code, stderr) == (EXIT_OK, "")
    (restart,) = restarts(out)
    assert restart["step"] == 8
    where = "step 9: rank 2 (dp2) differs from its replicas: model/layer0.attn.q.weight"
    assert where in restart["reason"]
    assert where in stdout
    assert numbers(out) == numbers(clean_out)
    assert final_state(out) == final_state(clean_out)


@pytest.mark.slow
def test_more_faults_than_restarts_end_the_run(tmp_path):
    out = tmp_path / "run"
    words = words_of(DP3, steps=100_000, save__memory_every=1, run__restarts=1)
    with training(out, *words) as process:
        first = send_signal(out, 0, signal.SIGKILL, step=5)

        def goes_on_after_restart(found) -> bool:
            return found.attempt == 1 and found.step > first.step + 2

        wait_for_rank(out, 0, goes_on_after_restart)
        send_signal(out, 2, signal.SIGKILL, step=1)
        code, _, stderr = finish(process)
    assert code == 1
    assert stderr.startswith("error: rank 2 (dp2): step ")
    assert len(restarts(out)) == 1
