"""Fault injection: only with a plan, once per fault, and undone after some steps."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest
import torch

from weft.comm.transport import Call
from weft.run.launch import DEFAULT_SUPERVISION, same_attempt
from weft.run.rank_status import Phase, RankStatus, StatusBoard
from weft.run.world import Attempt, Restart
from weft_selftest.chaos.fault_injection import (
    CALLS_BEFORE_START_FAULT,
    NUM_STEPS_ACTIVE,
    FaultInjection,
    InjectedError,
    flip_bit,
    read_ledger,
)
from weft_selftest.chaos.fault_plan import FaultKind, FaultPlan, PlannedFault

SUM = "all_reduce(sum) float32[32]"


def gradient_call(buffer: torch.Tensor, axis: str = "dp") -> Call:
    return Call("all_reduce", axis, (0, 1, 2), 0, SUM, output=buffer)


def attempt_with(folder: Path, *faults: PlannedFault, number: int = 0) -> Attempt:
    plan = FaultPlan(faults, folder / "ledger", folder / "run", ("dp",))
    num_boards = len(os.listdir(folder))
    status = StatusBoard.create(folder / f"board{num_boards}", 1).rank(0)
    restart = None
    if number:
        restart = Restart(
            number, 9, rank=0, reason="killed", detected_s=0.1, at_s=7.0, had_started=True
        )
    return FaultInjection(plan).adapt(0, Attempt(status, restart=restart))


def fault(kind: FaultKind, phase: Phase, *, number: int = 0, rank: int = 0, step: int = 4):
    return PlannedFault(number, kind, phase, rank, step)


def test_without_a_plan_the_launcher_gives_ranks_a_plain_status(tmp_path):
    attempt = Attempt(StatusBoard.create(tmp_path / "board", 1).rank(0))
    assert DEFAULT_SUPERVISION.adapt_attempt is same_attempt
    assert type(same_attempt(0, attempt).status) is RankStatus


def test_a_fault_happens_once_in_its_phase_at_its_step_or_later(tmp_path):
    status = attempt_with(tmp_path, fault("exception", "evaluate")).status
    status.on_phase(3, "evaluate")
    status.on_phase(4, "save")
    with pytest.raises(InjectedError, match="step 6"):
        status.on_phase(6, "evaluate")
    again = attempt_with(
        tmp_path, fault("exception", "evaluate"), fault("clock", "data", number=1, rank=2), number=1
    ).status
    again.on_phase(5, "data")
    again.on_phase(6, "evaluate")
    lines = read_ledger(tmp_path / "ledger")
    assert [line.get("fault") for line in lines] == [0, None, None]
    assert lines[0]["num_done"] == 6
    assert lines[1] == {"attempt": 1, "detected_at_s": 7.0}
    assert lines[2]["attempt"] == 1
    assert lines[2]["step"] == 5


def test_a_fault_of_a_start_waits_for_connections_and_for_the_fault_before_it(tmp_path):
    faults = (fault("kill", "data", number=0), fault("exception", "start", number=1, step=0))
    call = gradient_call(torch.zeros(1))
    first = attempt_with(tmp_path, *faults).status
    for _ in range(CALLS_BEFORE_START_FAULT + 1):
        first.started(call)
    (tmp_path / "ledger").write_text('{"attempt": 0, "fault": 0}\n')
    second = attempt_with(tmp_path, *faults, number=1).status
    for _ in range(CALLS_BEFORE_START_FAULT - 1):
        second.started(call)
    with pytest.raises(InjectedError):
        second.started(call)


def test_a_full_disk_is_one_for_some_steps_only(tmp_path):
    status = attempt_with(tmp_path, fault("full_disk", "save")).status
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        status.on_phase(4, "save")
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "file").write_text("text")
        status.on_phase(4 + NUM_STEPS_ACTIVE, "data")
        (tmp_path / "file").write_text("text")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_one_bit_of_one_reduced_gradient_is_corrupted(tmp_path):
    status = attempt_with(tmp_path, fault("corrupted_message", "backward")).status
    buffer = torch.ones(32)
    calls = (gradient_call(buffer, axis="tp"), gradient_call(torch.ones(4)), gradient_call(buffer))
    status.on_phase(4, "backward")
    for call in (*calls, gradient_call(torch.ones(32))):
        position = status.started(call)
        status.waiting(call, position)
        if call is calls[-1]:
            assert (buffer == 1).all(), "not over another axis, and not in a message of few numbers"
        status.finished()
    assert (buffer != 1).sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bit_of_the_largest_element_flips_and_not_in_sign_or_exponent(dtype):
    buffer = torch.zeros(64, dtype=dtype)
    buffer[7] = -1.0
    for seed in range(20):
        before = buffer.clone()
        flip_bit(buffer, random.Random(seed))
        changed = (buffer != before).nonzero().flatten().tolist()
        assert changed == [7]
        assert 1.0 <= -buffer[7].item() < 2.0
