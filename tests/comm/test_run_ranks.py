"""`run_ranks` in threads and in processes: results by rank, the first failure raised, no process left."""

import functools
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.programs import programs
from weft.core.mesh import Mesh
from weft.errors import CommTimeout, ConfigError, Fault, RankError
from weft.testing import run_ranks


@dataclass
class Report:
    """A class of a test module, sent in both directions."""

    rank: int
    total: torch.Tensor


class OddError(Exception):
    def __init__(self, rank, *, reason):
        super().__init__(f"rank {rank}: {reason}")


def report(comm):
    total = comm.all_reduce(torch.ones(2), ("pp", "tp"))
    return Report(comm.rank, total)


def test_results_are_ordered_by_rank(transport):
    reports = run_ranks("pp2 tp2", report, transport=transport)
    assert [one.rank for one in reports] == [0, 1, 2, 3]
    for one in reports:
        assert type(one) is Report
        assert one.total.tolist() == [4, 4]


def test_closures_lambdas_and_recursive_functions_are_sent(transport):
    offset = 10

    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    assert run_ranks(
        "dp2", lambda comm, more=1: offset + comm.rank + more + factorial(4), transport=transport
    ) == [35, 36]


def test_rank_processes_start_with_the_modules_of_this_package_that_the_caller_has_imported():
    (modules,) = run_ranks("", lambda comm: set(sys.modules), transport="processes")
    assert "weft.testing" in modules
    assert "tests.comm.test_run_ranks" not in modules, "importing other modules may compute"


def test_a_mesh_of_one_rank(transport):
    assert run_ranks(Mesh.parse(""), lambda comm: comm.rank, transport=transport) == [0]


def test_ranks_run_one_thread_each_with_denormals_flushed(transport):
    def look(comm):
        return torch.get_num_threads(), (torch.tensor([1e-38]) / 100).item()

    before = torch.get_num_threads()
    assert run_ranks("dp2", look, transport=transport) == [(1, 0.0)] * 2
    assert torch.get_num_threads() == before


def test_the_error_of_the_first_failing_rank_names_rank_and_coordinates(transport):
    def fail(comm):
        comm.barrier("dp")
        if comm.rank == 2:
            raise ConfigError(Fault("model.layers", "is odd", got="3"))
        comm.barrier("dp")
        comm.barrier("tp")

    with pytest.raises(ConfigError, match=r"model.layers: is odd \(got 3\)") as caught:
        run_ranks("dp2 tp2", fail, transport=transport)
    assert "raised by rank 2 (dp1 tp0) of mesh dp2 tp2" in caught.value.__notes__[0]


def test_an_assertion_error_is_raised_in_the_caller(transport):
    def fail(comm):
        assert comm.rank == 0, f"rank is {comm.rank}"

    with pytest.raises(AssertionError, match="rank is 1"):
        run_ranks("dp2", fail, transport=transport)


def test_a_rank_that_does_not_finish_is_named_with_its_stack(transport):
    def sleep(comm):
        if comm.rank == 1:
            time.sleep(4)

    start = time.monotonic()
    with pytest.raises(
        CommTimeout, match=r"rank 1 \(tp1\) of mesh tp2 did not finish within 1.5 s"
    ) as caught:
        run_ranks("tp2", sleep, transport=transport, timeout_s=1.5)
    assert time.monotonic() - start < 3.5
    assert "in sleep" in caught.value.__notes__[0]


def test_a_collective_names_the_missing_rank_before_the_run_times_out(transport):
    def late(comm):
        if comm.rank == 1:
            time.sleep(4)
        comm.barrier("tp")

    with pytest.raises(
        CommTimeout, match=r"barrier over tp, ranks 0 1: rank 1 did not arrive within 1\.2 s"
    ):
        run_ranks("tp2", late, transport=transport, timeout_s=1.5)


def test_an_exception_that_cannot_be_unpickled_is_raised_as_text():
    def fail(comm):
        raise OddError(comm.rank, reason="of its own")

    with pytest.raises(
        RankError, match=r"rank 0 \(single rank\): (.|\n)*OddError: rank 0: of its own"
    ):
        run_ranks("", fail, transport="processes")


def test_a_killed_rank_is_reported():
    def fail(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(30)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 \(dp1\): process was killed by SIGKILL"):
        run_ranks("dp2", fail, transport="processes")
    assert time.monotonic() - start < 10


def test_rank_processes_have_the_folder_and_environment_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_TEST_WORD", "woven")

    def look(comm):
        return os.getcwd(), os.environ["WEFT_TEST_WORD"]

    assert run_ranks("dp2", look, transport="processes") == [(str(tmp_path), "woven")] * 2


def test_a_seed_in_one_rank_leaves_the_generators_of_the_others(transport):
    """In threads, too, although torch has one default CPU generator for a process."""

    def seed(comm):
        for rank in range(comm.mesh.size):
            if comm.rank == rank:
                torch.manual_seed(100 + rank)
            comm.barrier("dp")
        return torch.initial_seed()

    assert run_ranks("dp3", seed, transport=transport) == [100, 101, 102]


def test_a_generator_of_its_own_gives_each_rank_its_own_draws(transport):
    def draw(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        comm.barrier("dp")
        return torch.rand((), generator=generator).item()

    expected = [
        torch.rand((), generator=torch.Generator().manual_seed(rank)).item() for rank in range(3)
    ]
    assert run_ranks("dp3", draw, transport=transport) == expected


class Lazy:
    """A class of a test module with a cached property, which holds a lock before Python 3.12."""

    @functools.cached_property
    def twice(self):
        return 2 * self.rank


def test_a_class_with_a_cached_property_is_sent(transport):
    def read(comm):
        lazy = Lazy()
        lazy.rank = comm.rank
        return lazy.twice, lazy.twice

    assert run_ranks("dp2", read, transport=transport) == [(0, 0), (2, 2)]


def test_a_large_result_is_received():
    """Larger than the buffer of a pipe."""
    first, second = run_ranks(
        "dp2", lambda comm: torch.full((1_000_000,), comm.rank), transport="processes"
    )
    assert first.sum().item() == 0
    assert second.sum().item() == 1_000_000


def test_a_rank_that_exits_with_0_before_it_returns_is_an_error():
    def leave(comm):
        if comm.rank == 1:
            os._exit(0)

    with pytest.raises(
        RankError, match=r"rank 1 \(dp1\): process exited with code 0 before its function returned"
    ):
        run_ranks("dp2", leave, transport="processes")


def alive(pid):
    try:
        os.kill(pid, 0)
        path = Path(f"/proc/{pid}/stat")
        after_name = path.read_text().rpartition(")")[2]
        state = after_name.split()[0]
        return state != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pids, within_s=10.0):
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("ending", ["return", "raise", "time out"])
def test_no_process_is_left_behind(tmp_path, ending):
    def run(comm):
        (tmp_path / f"pid-{comm.rank}").write_text(str(os.getpid()))
        comm.barrier("dp")
        if ending == "raise" and comm.rank == 0:
            raise ValueError("over")
        if ending != "return":
            time.sleep(60)

    if ending == "return":
        run_ranks("dp3", run, transport="processes")
    else:
        with pytest.raises((ValueError, CommTimeout)):
            run_ranks("dp3", run, transport="processes", timeout_s=2.0)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)]
    assert wait_until_gone(pids) == []


SCRIPT = """
import os, pathlib, sys, time
from weft.testing import run_ranks

def run(comm):
    pathlib.Path(sys.argv[1], f"pid-{comm.rank}").write_text(str(os.getpid()))
    time.sleep(60)

if __name__ == "__main__":
    run_ranks("dp2", run, transport="processes")
"""


def test_a_killed_caller_leaves_no_server_and_no_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    with programs().running("", str(tmp_path), script=script) as caller:
        deadline = time.monotonic() + 60
        while (
            not all(file.exists() and file.read_text() for file in files)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        caller.kill()
    pids = [int(file.read_text()) for file in files]
    assert wait_until_gone(pids) == []


def test_eight_processes_start_in_well_under_a_second_after_the_first_run():
    """About 0.3 s on two idle cores; the bound leaves room for a busy machine."""
    run_ranks("dp2", lambda comm: comm.rank, transport="processes")
    start = time.monotonic()
    run_ranks("dp8", lambda comm: comm.all_reduce(torch.ones(1), "dp"), transport="processes")
    assert time.monotonic() - start < 5


def test_backward_of_every_thread_runs_in_that_thread():
    """See Note [Backward passes in rank threads]: a collective inside backward blocks no other
    rank.
    """

    def run(comm):
        seen = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(
            lambda grad: seen.append(threading.current_thread().name) or comm.all_reduce(grad, "dp")
        )
        loss = (x * (comm.rank + 1)).sum()
        loss.backward()
        return seen, x.grad.tolist()

    expected = [([f"rank {rank}"], [6.0, 6.0]) for rank in range(3)]
    assert run_ranks("dp3", run) == expected
