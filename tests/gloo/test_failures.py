"""Failures between processes: an error within the time-out that names collective, axis, group and ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.errors import CommError, CommTimeout, LaunchError, MismatchError, RankError
from weft.testing import run_ranks

TIMEOUT_S = 2.5


@dataclass
class Caught:
    """An error's message, and how long the call took."""

    message: str
    seconds: float


def catch(kind: type[Exception], call: Callable[[], object]) -> Caught:
    """The error of `kind` that `call` raises."""
    start = time.monotonic()
    with pytest.raises(kind) as error:
        call()
    seconds = time.monotonic() - start
    return Caught(str(error.value), seconds)


def short_timeout_comm(comm: Comm, folder: Path, name: str) -> Comm:
    """A second communicator of the same ranks, with a time-out of 2.5 s."""
    comm.barrier(("dp", "tp", "pp"))
    transport = ProcessTransport(
        comm.rank, comm.mesh.size, f"file://{folder}/{name}", timeout_s=TIMEOUT_S
    )
    return Comm(comm.mesh, comm.rank, transport)


def test_a_mismatch_names_the_ranks_and_the_group_stays_usable():
    def mismatch_four_times(comm):
        x = torch.ones(4)
        collective = comm.all_gather if comm.rank == 1 else comm.all_reduce
        shorter_on_rank_0 = x[1:] if comm.rank == 0 else x
        half_on_rank_0 = x if comm.rank else x[:2]
        double_elsewhere = x.double() if comm.rank else x
        caught = [
            catch(MismatchError, lambda: collective(x, "dp")),
            catch(MismatchError, lambda: comm.all_reduce(shorter_on_rank_0, "dp")),
            catch(MismatchError, lambda: comm.all_reduce(double_elsewhere, "dp")),
            catch(MismatchError, lambda: comm.all_gather(half_on_rank_0, "dp")),
        ]
        return [error.message for error in caught], comm.all_reduce(x, "dp").tolist()

    for messages, total in run_ranks("dp3", mismatch_four_times, transport="processes"):
        operation, shape, dtype, sizes = messages
        assert (
            "ranks 0 2: all_reduce(sum) float32[4]; rank 1: all_gather(dim 0) float32[4*]"
            in operation
        )
        assert "rank 0: all_reduce(sum) float32[3]; ranks 1 2: all_reduce(sum) float32[4]" in shape
        assert "rank 0: all_reduce(sum) float32[4]; ranks 1 2: all_reduce(sum) float64[4]" in dtype
        assert (
            "rank 0: all_gather(dim 0) float32[2*] input_split_sizes (2, 2, 2) output_split_sizes (2, 2, 2)"
            in sizes
        )
        assert total == [3.0] * 4


def test_a_message_of_another_shape_is_a_mismatch_on_both_ends():
    def exchange(comm):
        if comm.rank == 0:
            return catch(MismatchError, lambda: comm.send(torch.ones(2), "pp", to=1)).message
        return catch(MismatchError, lambda: comm.recv(torch.ones(3), "pp", source=0)).message

    for message in run_ranks("pp2", exchange, transport="processes"):
        assert "over pp" in message
        assert "rank 0: send float32[2]; rank 1: recv float32[3]" in message


@pytest.mark.parametrize("num_elements", [4, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_missing_rank_is_named_within_the_time_out(tmp_path, num_elements):
    all_axes = ("dp", "tp")

    def miss_rank_3(comm):
        short = short_timeout_comm(comm, tmp_path, "store")
        short.barrier(all_axes)
        short.checked = num_elements == 4
        caught = []
        if comm.rank != 3:
            caught.append(
                catch(CommTimeout, lambda: short.all_reduce(torch.ones(num_elements), all_axes))
            )
            caught.append(catch(CommError, lambda: short.barrier(all_axes)))
        comm.barrier(all_axes)
        return caught

    message = f"all_reduce(sum) float32[{num_elements}] over dp+tp, ranks 0 1 2 3: rank 3 did not arrive within 2.5 s"
    for first, second in run_ranks("dp2 tp2", miss_rank_3, transport="processes")[:3]:
        assert first.message == message
        assert first.seconds < TIMEOUT_S + 1
        assert second.message.endswith(
            f"its connections were closed after an earlier failure: {message}"
        )


@pytest.mark.slow
def test_among_ranks_that_arrive_one_after_the_other_only_the_missing_one_is_named(tmp_path):
    def arrive_in_order(comm):
        short = short_timeout_comm(comm, tmp_path, "store")
        short.barrier("dp")
        short.checked = False
        time.sleep(1.5 * comm.rank)
        message = ""
        if comm.rank < 2:
            message = catch(CommError, lambda: short.all_reduce(torch.ones(2), "dp")).message
        comm.barrier("dp")
        return message

    first, second, _ = run_ranks("dp3", arrive_in_order, transport="processes")
    assert (
        first
        == "all_reduce(sum) float32[2] over dp, ranks 0 1 2: rank 2 did not arrive within 2.5 s"
    )
    assert "rank 2" in second


def test_the_first_collective_of_a_group_names_the_missing_rank(tmp_path):
    def miss_rank_0(comm):
        short = short_timeout_comm(comm, tmp_path, "store")
        caught = None
        if comm.rank != 0:
            caught = catch(CommTimeout, lambda: short.all_reduce(torch.ones(2), "dp"))
        comm.barrier("dp")
        return caught

    for caught in run_ranks("dp3", miss_rank_0, transport="processes")[1:]:
        assert (
            caught.message
            == "all_reduce(sum) float32[2] over dp, ranks 0 1 2: rank 0 did not arrive within 2.5 s"
        )
        assert caught.seconds < TIMEOUT_S + 1


def test_a_send_without_receive_and_a_receive_without_send_name_the_other_end(tmp_path):
    large = torch.ones(70_000)

    def exchange_once(comm):
        if comm.rank == 0:
            comm.send(torch.ones(2), "pp", to=1)
        else:
            comm.recv(torch.ones(2), "pp", source=0)

    def send_only(comm):
        short = short_timeout_comm(comm, tmp_path, "send")
        with short.unchecked():
            exchange_once(short)
            if comm.rank == 0:
                return catch(CommTimeout, lambda: short.send(large, "pp", to=1)).message
        return None

    def receive_only(comm):
        short = short_timeout_comm(comm, tmp_path, "recv")
        with short.unchecked():
            exchange_once(short)
            if comm.rank == 1:
                return catch(CommTimeout, lambda: short.recv(large, "pp", source=0)).message
        return None

    def both(comm):
        messages = [send_only(comm), receive_only(comm)]
        comm.barrier("pp")
        return messages

    (sender, _), (_, receiver) = run_ranks("pp2", both, transport="processes")
    assert sender == "send float32[70000] over pp, ranks 0 -> 1: rank 1 did not arrive within 2.5 s"
    assert (
        receiver == "recv float32[70000] over pp, ranks 0 -> 1: rank 0 did not arrive within 2.5 s"
    )


def test_a_dead_rank_is_reported_and_not_the_ranks_that_lost_it():
    def exit_on_rank_1(comm):
        comm.barrier("dp")
        comm.checked = False
        if comm.rank == 1:
            os._exit(7)
        comm.all_reduce(torch.ones(200_000), "dp")

    with pytest.raises(RankError, match=r"rank 1 \(dp1\): process exited with code 7"):
        run_ranks("dp3", exit_on_rank_1, transport="processes")


def test_a_lost_connection_names_the_lost_rank(tmp_path):
    def close_on_rank_1(comm):
        short = short_timeout_comm(comm, tmp_path, "store")
        short.barrier("dp")
        if comm.rank == 1:
            short.transport.close()
        short.checked = False
        caught = catch(CommError, lambda: short.all_reduce(torch.ones(200_000), "dp"))
        comm.barrier("dp")
        return caught

    first, closed, last = run_ranks("dp3", close_on_rank_1, transport="processes")
    assert "this transport was closed" in closed.message
    prefix = r"all_reduce\(sum\) float32\[200000\] over dp, ranks 0 1 2: "
    for caught in (first, last):
        assert re.match(f"{prefix}(lost rank 1 |rank 1 did not arrive)", caught.message)
        assert (
            caught.seconds < TIMEOUT_S + 2
        )  # a closed connection or a time-out, by the order of connections


def test_a_missing_rendezvous_is_a_launch_error(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        LaunchError, match=r"rank 0 of 2 cannot meet the others at env://.*MASTER_ADDR"
    ):
        ProcessTransport(0, 2)
