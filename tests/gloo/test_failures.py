"""Processes: what goes wrong is an error within the time-out, and it names operation, axis, group and ranks."""

import os
import re
import time

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.errors import CommError, CommTimeout, LaunchError, MismatchError, RankError
from weft.testing import run_ranks

TIMEOUT_S = 2.5


def impatient(comm, folder, name):
    """A second transport beside the one of `comm`, with a time-out of 2.5 s."""
    comm.barrier(("dp", "tp", "pp"))
    world = ProcessTransport(comm.rank, comm.mesh.size, f"file://{folder}/{name}", timeout_s=TIMEOUT_S)
    return Comm(comm.mesh, comm.rank, world)


def caught(kind, play):
    """The text of the error that `play` raises, and how long it took."""
    start = time.monotonic()
    with pytest.raises(kind) as error:
        play()
    return str(error.value), time.monotonic() - start


def test_a_mismatch_names_the_ranks_and_the_group_stays_usable():
    def play(comm):
        x, told = torch.ones(4), []
        told.append(caught(MismatchError, lambda: (comm.all_gather if comm.rank == 1 else comm.all_reduce)(x, "dp"))[0])
        told.append(caught(MismatchError, lambda: comm.all_reduce(x[comm.rank == 0 :], "dp"))[0])
        told.append(caught(MismatchError, lambda: comm.all_reduce(x.double() if comm.rank else x, "dp"))[0])
        told.append(caught(MismatchError, lambda: comm.all_gather(x if comm.rank else x[:2], "dp"))[0])
        return told, comm.all_reduce(x, "dp").tolist()

    for told, total in run_ranks("dp3", play, transport="processes"):
        assert "ranks 0 2: all_reduce(sum) float32[4]; rank 1: all_gather(dim 0) float32[4*]" in told[0]
        assert "rank 0: all_reduce(sum) float32[3]; ranks 1 2: all_reduce(sum) float32[4]" in told[1]
        assert "rank 0: all_reduce(sum) float32[4]; ranks 1 2: all_reduce(sum) float64[4]" in told[2]
        assert "rank 0: all_gather(dim 0) float32[2*] input_split_sizes (2, 2, 2) output_split_sizes (2, 2, 2)" in told[3]
        assert total == [3.0] * 4


def test_a_message_of_another_shape_is_a_mismatch_on_both_ends():
    def play(comm):
        if comm.rank == 0:
            return caught(MismatchError, lambda: comm.send(torch.ones(2), "pp", to=1))[0]
        return caught(MismatchError, lambda: comm.recv(torch.ones(3), "pp", source=0))[0]

    for told in run_ranks("pp2", play, transport="processes"):
        assert "over pp" in told
        assert "rank 0: send float32[2]; rank 1: recv float32[3]" in told


@pytest.mark.parametrize("num_elements", [4, 200_000])
def test_a_rank_that_never_comes_is_named_within_the_time_out(tmp_path, num_elements):
    def play(comm):
        named = impatient(comm, tmp_path, "store")
        everyone = ("dp", "tp")
        named.barrier(everyone)
        named.checked = num_elements == 4
        told = []
        if comm.rank != 3:
            told.append(caught(CommTimeout, lambda: named.all_reduce(torch.ones(num_elements), everyone)))
            told.append(caught(CommError, lambda: named.barrier(everyone)))
        comm.barrier(everyone)
        return told

    for first, second in run_ranks("dp2 tp2", play, transport="processes")[:3]:
        told = f"all_reduce(sum) float32[{num_elements}] over dp+tp, ranks 0 1 2 3: rank 3 did not come within 2.5 s"
        assert first[0] == told
        assert first[1] < TIMEOUT_S + 1
        assert second[0].endswith(f"its connections were closed after an earlier failure: {told}")


def test_of_ranks_that_come_one_after_the_other_only_the_missing_one_is_named(tmp_path):
    def play(comm):
        named = impatient(comm, tmp_path, "store")
        named.barrier("dp")
        named.checked = False
        time.sleep(1.5 * comm.rank)
        told = ""
        if comm.rank < 2:
            told, _ = caught(CommError, lambda: named.all_reduce(torch.ones(2), "dp"))
        comm.barrier("dp")
        return told

    first, second, _ = run_ranks("dp3", play, transport="processes")
    assert first == "all_reduce(sum) float32[2] over dp, ranks 0 1 2: rank 2 did not come within 2.5 s"
    assert "rank 2" in second


def test_a_group_that_not_all_members_come_to_names_the_missing_one(tmp_path):
    def play(comm):
        named = impatient(comm, tmp_path, "store")
        told = caught(CommTimeout, lambda: named.all_reduce(torch.ones(2), "dp")) if comm.rank else None
        comm.barrier("dp")
        return told

    for told, took_s in run_ranks("dp3", play, transport="processes")[1:]:
        assert told == "all_reduce(sum) float32[2] over dp, ranks 0 1 2: rank 0 did not come within 2.5 s"
        assert took_s < TIMEOUT_S + 1


def test_a_message_that_nobody_sends_or_takes_names_the_other_end(tmp_path):
    def play(comm):
        told = []
        for name in ("send", "recv"):
            named = impatient(comm, tmp_path, name)
            with named.unchecked():
                named.send(torch.ones(2), "pp", to=1) if comm.rank == 0 else named.recv(torch.ones(2), "pp", source=0)
                if (comm.rank == 0) == (name == "send"):
                    alone = named.send if name == "send" else named.recv
                    end = {"to": 1} if name == "send" else {"source": 0}
                    told.append(
                        caught(CommTimeout, lambda alone=alone, end=end: alone(torch.ones(70_000), "pp", **end))
                    )
            comm.barrier("pp")
        return told

    ((sender, _),), ((receiver, _),) = run_ranks("pp2", play, transport="processes")
    assert sender == "send float32[70000] over pp, ranks 0 -> 1: rank 1 did not come within 2.5 s"
    assert receiver == "recv float32[70000] over pp, ranks 0 -> 1: rank 0 did not come within 2.5 s"


def test_of_a_rank_that_died_and_those_who_lost_it_the_dead_one_is_told():
    def play(comm):
        comm.barrier("dp")
        comm.checked = False
        if comm.rank == 1:
            os._exit(7)
        comm.all_reduce(torch.ones(200_000), "dp")

    with pytest.raises(RankError, match=r"rank 1 \(dp1\): process exited with code 7"):
        run_ranks("dp3", play, transport="processes")


def test_a_lost_connection_names_who_was_not_there(tmp_path):
    def play(comm):
        named = impatient(comm, tmp_path, "store")
        named.barrier("dp")
        if comm.rank == 1:
            named.transport.close()
        named.checked = False
        told = caught(CommError, lambda: named.all_reduce(torch.ones(200_000), "dp"))
        comm.barrier("dp")
        return told

    results = run_ranks("dp3", play, transport="processes")
    assert "this transport was closed" in results[1][0]
    for told, took_s in (results[0], results[2]):
        assert re.match(
            r"all_reduce\(sum\) float32\[200000\] over dp, ranks 0 1 2: (lost rank 1 |rank 1 did not come)", told
        )
        assert took_s < TIMEOUT_S + 2  # whether a connection breaks or runs out depends on who talks to whom first


def test_no_meeting_place_is_an_error_at_the_door(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(LaunchError, match=r"rank 0 of 2 cannot meet the others at env://.*MASTER_ADDR"):
        ProcessTransport(0, 2)
