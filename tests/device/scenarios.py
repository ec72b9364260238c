"""What threads and forks of a process with the fake device may do; `measure` runs them."""

# ruff: noqa: E402

from __future__ import annotations

import ctypes
import os
import threading
import time

ctypes.CDLL(os.environ["WEFT_FAKE_CUDA"])

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.comm.threads import ThreadWorld
from weft.run.devices import fork_problem
from weft.run.rank_threads import run_rank_threads

MEETING_S, NAMING_S = 3.0, 5.0


def fork() -> None:
    """The first backward, of CPU tensors, makes forks of this process useless, and it is seen."""
    assert fork_problem() == "", fork_problem()
    torch.ones(1, requires_grad=True).sum().backward()
    deadline = time.monotonic() + NAMING_S  # the new threads name themselves
    while fork_problem() == "" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "autograd" in fork_problem()
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def threads() -> None:
    """Two rank threads on one GPU meet inside their backward passes; plain threads do not."""
    world = ThreadWorld(2, devices=["cuda:0", "cuda:0"])
    meeting = threading.Barrier(2)
    run = run_rank_threads(lambda rank: meet_in_backward(meeting), world)
    assert not run.failures, run.failures
    broken = threading.Barrier(2)
    errors: list[Exception] = []
    plain = [threading.Thread(target=catch, args=(broken, errors)) for _ in range(2)]
    for thread in plain:
        thread.start()
    for thread in plain:
        thread.join()
    assert errors


def catch(meeting: threading.Barrier, errors: list[Exception]) -> None:
    try:
        meet_in_backward(meeting)
    except (RuntimeError, threading.BrokenBarrierError) as error:
        errors.append(error)


def meet_in_backward(meeting: threading.Barrier) -> None:
    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            meeting.wait(MEETING_S)
            return gradient

    with FakeTensorMode():
        x = torch.ones(2, device="cuda:0", requires_grad=True)
        Meet.apply(x).sum().backward()
        assert x.grad is not None
        assert x.grad.is_cuda


SCENARIOS = {"fork": fork, "threads": threads}
