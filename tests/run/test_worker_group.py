"""Forking a worker group: rejected if CUDA is in use or the system has no process left."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch

from weft.errors import LaunchError
from weft.run.worker_group import fork_workers


def test_a_process_that_uses_cuda_is_not_forked(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="CUDA does not survive a fork"):
        fork_workers(2, tmp_path)


def test_a_failed_fork_is_one_line(monkeypatch, tmp_path):
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    gc.unfreeze()  # of what the session of the tests has frozen
    with pytest.raises(
        LaunchError,
        match=r"^ranks: cannot start rank 0 of 2 \(got .*Resource temporarily unavailable\)$",
    ):
        fork_workers(2, tmp_path)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "signals are unblocked afterwards"


def test_what_a_rank_inherits_is_left_to_no_garbage_collection(monkeypatch, tmp_path):
    frozen: list[int] = []

    def refuse() -> int:
        frozen.append(gc.get_freeze_count())
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(LaunchError):
        fork_workers(1, tmp_path)
    assert frozen[-1] > 100_000, "the objects of torch and weft"
    assert gc.get_freeze_count() == 0, "the launcher's own garbage is collected again"
