"""`weft.init`: one line turns a plain script into ranks, which look like one program to the user."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
import torch.distributed as dist

import weft
from tests.programs import programs
from weft.errors import LaunchError
from weft.testing import run_ranks

SCRIPT = """
import sys, tempfile, torch, weft

with tempfile.TemporaryDirectory() as folder:
    comm = weft.init("dp2 tp2", device="cpu")
    total = comm.all_reduce(torch.tensor([float(comm.rank)]), ("dp", "tp"))
    sys.stdout.write(f"rank {comm.rank} got {total.item()}\\n")
    if "fail" in sys.argv and comm.rank == 2:
        raise ValueError("rank 2 cannot go on")
    comm.barrier(("dp", "tp"))
"""
ENV = {name: value for name, value in os.environ.items() if name != "WEFT_TRACEBACK"}


def run_script(*words: str, folder) -> subprocess.CompletedProcess[str]:
    env = {**ENV, "TMPDIR": str(folder)}
    return programs().run(SCRIPT, *words, environ=env)


def test_a_script_continues_as_every_rank_and_exits_once(tmp_path):
    done = run_script(folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"rank {rank} got 6.0" for rank in range(4)]
    left = {path.name for path in tmp_path.iterdir()}
    # torch's compile cache, created when torch._dynamo is imported
    torch_cache = {name for name in left if name.startswith("torchinductor_")}
    assert left - torch_cache == set(), "no temporary folder is left"


def test_an_error_of_one_rank_is_printed_once(tmp_path):
    done = run_script("fail", folder=tmp_path)
    assert done.returncode == 1
    first, *rest = done.stderr.splitlines()
    assert (
        first == "error: rank 2 (dp1 tp0): ValueError: rank 2 cannot go on [<string>:9 in <module>]"
    )
    assert rest == ["  traceback: set WEFT_TRACEBACK=1 and run again"]


DEADLOCK = """
import torch, weft

comm = weft.init("dp2 tp2", device="cpu")
first, second = ("dp", "tp") if comm.rank in (0, 3) else ("tp", "dp")
comm.all_reduce(torch.ones(4), first)
comm.all_reduce(torch.ones(4), second)
"""


def test_ranks_that_wait_for_each_other_in_two_groups_are_all_named_within_seconds():
    done = programs().run(DEADLOCK, environ=ENV)
    assert done.returncode == 1
    first, *_ = done.stderr.splitlines()
    assert ": deadlock for 2." in first
    for waits in (
        "rank 0 waits in all_reduce(sum) float32[4] over dp, ranks 0 2 for rank 2",
        "rank 2 waits in all_reduce(sum) float32[4] over tp, ranks 2 3 for rank 3",
        "rank 3 waits in all_reduce(sum) float32[4] over dp, ranks 1 3 for rank 1",
        "rank 1 waits in all_reduce(sum) float32[4] over tp, ranks 0 1 for rank 0",
        "2 = dp1 tp0",
    ):
        assert waits in first


def test_one_rank_is_this_process():
    script = "import os, weft; pid = os.getpid(); comm = weft.init(''); assert os.getpid() == pid; assert comm.rank == 0"
    done = programs().run(script, environ=ENV)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_world_of_another_size_is_one_line(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        LaunchError,
        match=r"^mesh: differs from the world size \(got 3 ranks; need 4 for 'dp2 tp2'\)",
    ):
        weft.init("dp2 tp2", device="cpu")


AFTER_THREADS = """
import os, sys, torch, weft

torch.set_num_threads(2)
if "compute" in sys.argv:
    torch.ones(1 << 20).exp()
comm = weft.init("dp2", device="cpu")
torch.set_num_threads(2)
torch.ones(1 << 20).exp()
sys.stdout.write(f"{comm.all_reduce(torch.ones(1), 'dp').item()}\\n")
"""


@pytest.mark.timeout(60)
def test_after_an_operation_with_several_threads_the_start_is_an_error_and_no_hang():
    done = programs().run(AFTER_THREADS, "compute", environ=ENV)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "has computed with several threads, and they do not survive a fork. Fix: start" in last
    assert "torchrun --nproc-per-node 2" in last


@pytest.mark.timeout(60)
def test_ranks_of_a_process_that_has_computed_nothing_use_several_threads():
    done = programs().run(AFTER_THREADS, environ=ENV)
    assert (done.returncode, done.stdout) == (0, "2.0\n2.0\n")


def test_a_world_that_the_script_has_initialised_is_used(tmp_path):
    """Without variables of torchrun a fork would have made a second world; with them, but without its
    agent, rank 0 could not have listened on the port again.
    """

    def rank(comm):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=2)
        own = weft.init("tp2", device="cpu")
        total = own.all_reduce(torch.ones(1), "tp").item()
        with pytest.raises(LaunchError, match=r"mesh: differs from the world size \(got 2 ranks"):
            weft.init("tp3", device="cpu")
        dist.destroy_process_group()
        return os.getpid(), own.rank, total

    (first, *of_first), (second, *of_second) = run_ranks("dp2", rank, transport="processes")
    assert first != second
    assert (of_first, of_second) == ([0, 2.0], [1, 2.0])
