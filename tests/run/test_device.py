"""Claims about the choice of a device: one GPU for every local rank, or the CPU for all of them."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from weft.errors import LaunchError
from weft.run.rank_setup import choose_device
from weft.run.worker_group import fork_workers


@pytest.mark.parametrize(
    ("choice", "num_gpus", "devices"),
    [
        ("auto", 0, ["cpu", "cpu"]),
        ("auto", 1, ["cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("auto", 8, ["cuda:0", "cuda:1"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cpu", 8, ["cpu", "cpu"]),
    ],
)
def test_two_local_ranks(monkeypatch, choice, num_gpus, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert [str(choose_device(choice, local_rank=rank, local_size=2)) for rank in range(2)] == devices


def test_too_few_gpus_are_one_line_where_cuda_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError) as caught:
        choose_device("cuda", local_rank=0, local_size=2)
    assert str(caught.value) == (
        "device: not enough GPUs (got 1 GPUs for 2 local ranks; need one for each rank). "
        "Fix: use fewer ranks, or --device cpu"
    )


def test_a_process_that_uses_cuda_is_not_forked(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="CUDA does not survive a fork"):
        fork_workers(2, tmp_path)


def test_a_system_that_refuses_processes_is_one_line(monkeypatch, tmp_path):
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(
        LaunchError, match=r"^ranks: cannot start rank 0 of 2 \(got .*Resource temporarily unavailable\)$"
    ):
        fork_workers(2, tmp_path)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "signals come through afterwards"
