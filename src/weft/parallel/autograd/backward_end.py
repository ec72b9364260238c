"""Calls a function at the end of the backward that is running, which has a number."""

from __future__ import annotations

from collections.abc import Callable

import torch

NO_BACKWARD = -1


def after_this_backward(act: Callable[[], None]) -> None:
    """Call `act` at the end of the backward that is running in this thread."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(act)


def backward_id() -> int:
    """Which backward is running in this thread; `NO_BACKWARD` outside of one."""
    return torch._C._current_graph_task_id()
