"""Set-up of a rank: its device (a GPU for every local rank, or the CPU for all), and memory reused without page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weft.errors import LaunchError
from weft.run.rank_setup import choose_device

SCRIPT = """
import resource, sys, torch
from weft.run.rank_setup import prepare_rank

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        torch.ones(16, 2**20).add_(1)  # 64 MB: mapped anew every time by default, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults_of_a_step()
prepare_rank(1)
later = [faults_of_a_step() for _ in range(6)]  # the heap grows in the first ones
sys.stdout.write(f"{first} {later[-1]}")
"""


def test_freed_memory_is_reused_by_later_steps():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before > 30_000
    assert after < 1_000


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
def test_devices_of_two_local_ranks(monkeypatch, choice, num_gpus, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert [
        str(choose_device(choice, local_rank=rank, local_size=2)) for rank in range(2)
    ] == devices


def test_too_few_gpus_for_device_cuda_are_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError) as caught:
        choose_device("cuda", local_rank=0, local_size=2)
    assert str(caught.value) == (
        "device: not enough GPUs (got 1 GPU for 2 local ranks; need one for each rank). "
        "Fix: use fewer ranks, or --device cpu"
    )
