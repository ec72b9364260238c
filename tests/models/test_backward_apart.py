"""A backward before the ranks are forked: on machines with GPUs in a process of its own, with the same result or exception."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from weft.errors import Fault, PlanError
from weft.models.common import backward_apart as module
from weft.models.common.backward_apart import backward_apart


@pytest.fixture
def _with_gpu(monkeypatch):
    monkeypatch.setattr(module, "may_have_gpu", lambda: True)
    monkeypatch.setattr(module, "_has_threads", lambda: False)


def gradient() -> tuple[int, float]:
    x = torch.ones((), requires_grad=True)
    (found,) = torch.autograd.grad(3 * x, x)
    return os.getpid(), found.item()


@pytest.mark.usefixtures("_with_gpu")
def test_a_fork_computes_it_where_a_gpu_may_be():
    pid, found = backward_apart(gradient)
    assert pid != os.getpid()
    assert found == 3


def test_this_process_computes_it_where_no_gpu_is(monkeypatch):
    monkeypatch.setattr(module, "may_have_gpu", lambda: False)
    assert backward_apart(gradient) == (os.getpid(), 3)


def test_this_process_computes_it_if_it_has_threads(monkeypatch):
    monkeypatch.setattr(module, "may_have_gpu", lambda: True)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert backward_apart(gradient) == (os.getpid(), 3)
    finally:
        release.set()
        thread.join()


@pytest.mark.usefixtures("_with_gpu")
def test_the_exception_is_raised_here():
    def reject() -> None:
        raise PlanError(
            Fault("layer0", "is a parameter that the loss does not use", fix="remove it")
        )

    with pytest.raises(PlanError, match="layer0: is a parameter that the loss does not use"):
        backward_apart(reject)


@pytest.mark.usefixtures("_with_gpu")
def test_an_exception_that_cannot_be_pickled_keeps_its_type_and_text():
    class LocalError(Exception):
        pass

    def fail() -> None:
        raise LocalError("no gradient")

    with pytest.raises(RuntimeError, match="LocalError: no gradient"):
        backward_apart(fail)


@pytest.mark.usefixtures("_with_gpu")
def test_a_process_that_dies_is_named():
    with pytest.raises(RuntimeError, match="the process of a backward ended with code 7"):
        backward_apart(lambda: os._exit(7))
