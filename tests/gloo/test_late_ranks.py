"""Ranks that do not arrive at a collective, in processes: a waiting rank reports them, and the call ends when they arrive."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.observe import LateRanks
from weft.comm.process_groups import ProcessTransport
from weft.testing import run_ranks

LATE_AFTER_S = 0.8
ABSENT_S = 2.0
"""How long the late rank stays away."""


def comm_with_short_interval(
    comm: Comm, folder: Path, on_late: Callable[[LateRanks], None]
) -> Comm:
    """A second transport beside that of `comm`, which reports late ranks after 0.8 s."""
    store = f"file://{folder}/store"
    transport = ProcessTransport(
        comm.rank, comm.mesh.size, store, timeout_s=30, late_after_s=LATE_AFTER_S
    )
    return Comm(comm.mesh, comm.rank, transport, on_late=on_late)


def reports_of(
    mesh: str,
    folder: Path,
    call: Callable[[Comm], float],
    *,
    late_rank: int,
    connected: bool = True,
) -> list[tuple[list[LateRanks], float]]:
    """Per rank: (reports, result of `call`), where `late_rank` comes to the call 2 s after the
    others.
    """

    def on_rank(comm: Comm) -> tuple[list[LateRanks], float]:
        reports: list[LateRanks] = []
        late = comm_with_short_interval(comm, folder, reports.append)
        if connected:
            call(late)
        comm.barrier(("dp", "tp", "pp"))
        if comm.rank == late_rank:
            time.sleep(ABSENT_S)
        result = call(late)
        comm.barrier(("dp", "tp", "pp"))
        late.transport.close()
        return reports, result

    return run_ranks(mesh, on_rank, transport="processes")


def checked_all_reduce(comm: Comm) -> float:
    return comm.all_reduce(torch.ones(4), ("dp", "tp"))[0].item()


def unchecked_all_reduce(comm: Comm) -> float:
    with comm.unchecked():
        return checked_all_reduce(comm)


def unchecked_message(comm: Comm) -> float:
    x = torch.tensor([7.0 if comm.rank == 0 else 0.0])
    with comm.unchecked():
        if comm.rank == 0:
            comm.send(x, "pp", to=1)
        else:
            comm.recv(x, "pp", source=0)
    return x.item()


@pytest.mark.parametrize(
    ("call", "connected"),
    [
        (checked_all_reduce, True),
        (unchecked_all_reduce, False),
        pytest.param(checked_all_reduce, False, marks=pytest.mark.slow),
        pytest.param(unchecked_all_reduce, True, marks=pytest.mark.slow),
    ],
)
def test_a_late_rank_is_reported_once_with_collective_group_and_coordinates(
    tmp_path: Path, call: Callable[[Comm], float], connected: bool
) -> None:
    ranks = reports_of("dp2 tp2", tmp_path, call, late_rank=2, connected=connected)
    assert [result for _, result in ranks] == [4.0] * 4
    reports = [report for per_rank, _ in ranks for report in per_rank]
    assert len(reports) == 1
    report = reports[0]
    assert report.call == "all_reduce(sum) float32[4] over dp+tp, ranks 0 1 2 3"
    assert report.missing == (2,)
    assert report.coordinates[2] == "dp1 tp0"
    assert LATE_AFTER_S <= report.waited_s < ABSENT_S


def test_the_late_end_of_a_message_is_reported_by_the_other(tmp_path: Path) -> None:
    sender, receiver = reports_of("pp2", tmp_path, unchecked_message, late_rank=0)
    assert sender == ([], 7.0)
    assert receiver[1] == 7.0
    assert [report.call for report in receiver[0]] == ["recv float32[1] over pp, ranks 0 -> 1"]
    assert receiver[0][0].missing == (0,)


def test_ranks_that_started_the_collective_are_not_late_even_if_they_do_not_wait_for_it(
    tmp_path: Path,
) -> None:
    def on_rank(comm: Comm) -> list[LateRanks]:
        reports: list[LateRanks] = []
        late = comm_with_short_interval(comm, tmp_path, reports.append)
        late.barrier("dp")
        late.checked = False
        if comm.rank == 2:
            time.sleep(ABSENT_S)
        work = late.start_all_reduce(torch.ones(200_000), "dp")
        if comm.rank == 1:
            time.sleep(ABSENT_S)
        work.wait()
        comm.barrier("dp")
        late.transport.close()
        return reports

    reports = [
        report
        for per_rank in run_ranks("dp3", on_rank, transport="processes")
        for report in per_rank
    ]
    assert [report.missing for report in reports] == [(2,)]


def test_by_default_the_note_goes_to_stderr(tmp_path: Path) -> None:
    def on_rank(comm: Comm) -> str:
        store = f"file://{tmp_path}/store"
        transport = ProcessTransport(
            comm.rank, comm.mesh.size, store, timeout_s=30, late_after_s=LATE_AFTER_S
        )
        late = Comm(comm.mesh, comm.rank, transport)
        late.barrier("dp")
        if comm.rank == 1:
            time.sleep(ABSENT_S)
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            late.barrier("dp")
        transport.close()
        return stderr.getvalue()

    note, nothing = run_ranks("dp2", on_rank, transport="processes")
    assert nothing == ""
    assert note.startswith("note: rank 0 (dp0) has waited ")
    assert note.endswith(
        "in barrier over dp, ranks 0 1: rank 1 (dp1) has not arrived; still waiting\n"
    )
