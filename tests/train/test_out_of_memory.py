"""A rank that is out of memory says what it held, largest part first, and what would need less."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.matrix.layouts import Case
from tests.parallel.test_zero import make_step, run_step
from weft.errors import WeftError
from weft.testing import run_ranks
from weft.train import out_of_memory
from weft.train.out_of_memory import (
    AllocatedMemory,
    held_bytes,
    named_out_of_memory,
    out_of_memory_fault,
)

GIB = 2**30


def test_the_largest_part_comes_first_with_its_remedy():
    memory = AllocatedMemory(allocated=70 * GIB, reserved=75 * GIB, total=80 * GIB)
    held = {"parameters": 10 * GIB, "gradients": 10 * GIB, "optimizer states": 40 * GIB}
    line = str(out_of_memory_fault("rank 1 (dp1) on cuda:0", memory, held))
    assert line.startswith(
        "memory: rank 1 (dp1) on cuda:0 is out of memory (got 75.00 GiB of 80.00"
    )
    assert "reserved: optimizer states 40.00 GiB, parameters 10.00 GiB" in line
    assert "activations and temporary tensors 10.00 GiB, unused parts of segments 5.00 GiB" in line
    assert "Fix: parallel.zero 1 shards them" in line


@pytest.mark.parametrize(
    ("zero", "sharded"), [(0, ()), (3, ("parameters", "gradients", "optimizer states"))]
)
def test_held_bytes_are_those_of_the_tensors(zero, sharded, monkeypatch):
    case = Case("dp2", family="gpt2", zero=zero, microbatches=1)
    used = AllocatedMemory(allocated=0, reserved=0, total=GIB)
    monkeypatch.setattr(out_of_memory.AllocatedMemory, "of", lambda device: used)

    def rank(comm):
        step = make_step(case, comm)
        run_step(step, case)
        with (
            pytest.raises(WeftError, match=rf"rank {comm.rank} \(dp{comm.rank}\) on cpu is out of"),
            named_out_of_memory(comm, partial(held_bytes, step)),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return held_bytes(step), sum(param.shard.size for param in step.model.shards.values())

    for held, num_params in run_ranks("dp2", rank):
        parts = {"parameters": 1, "gradients": 1, "optimizer states": 2}
        for name, copies in parts.items():
            expected = 8 * num_params * copies
            if name in sharded:
                expected /= 2
            assert held[name] == pytest.approx(expected, rel=0.1), name


def test_a_failed_allocation_on_the_cpu_says_what_the_rank_held():
    def rank(comm):
        with (
            pytest.raises(
                WeftError, match=r"rank 0 on cpu is out of memory \(got .* reserved: act"
            ),
            named_out_of_memory(comm, dict),
        ):
            torch.empty(2**60, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="shape"), named_out_of_memory(comm, dict):
            torch.ones(2) @ torch.ones(3, 2)

    run_ranks("dp1", rank)
