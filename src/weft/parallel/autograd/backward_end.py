"""Calls a function at the end of the backward that is running."""

from __future__ import annotations

from collections.abc import Callable

import torch


def after_this_backward(act: Callable[[], None]) -> None:
    """Call `act` at the end of the backward that is running in this thread."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(act)
