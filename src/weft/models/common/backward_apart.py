"""A backward in a forked process on machines with GPUs: this process can still fork the ranks afterwards.

Note [Backward before the ranks are forked]
    Where there is a GPU, the first backward of a process starts a thread for each device, also one
    on the meta device, and a fork of a process with these threads cannot compute gradients. So what
    is found out by a backward before the ranks start is computed in a fork, which hands back the
    result or the exception. In a process that forks no ranks (one that uses CUDA already, or has
    threads), and on machines without a GPU, it is computed as it is.
"""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - from a fork of this process to this one
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch

from weft.core.gpu_files import may_have_gpu

T = TypeVar("T")


def backward_apart(function: Callable[[], T]) -> T:
    """What the function returns or raises; see Note [Backward before the ranks are forked].

    Args:
        function: its result is pickled; what it changes in this process may be lost.
    """
    if not may_have_gpu() or torch.cuda.is_initialized() or _has_threads():
        return function()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _answer_and_exit(function, writer)
    # else the parent would read its own end, and never come to the end of the answer
    os.close(writer)
    with open(reader, "rb") as answer:
        # before the wait: a long answer fills the pipe, and the child would wait for a reader
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"the process of a backward ended with code {code}")
    is_error, found = pickle.loads(text)  # noqa: S301 - of our own fork
    if is_error:
        raise found
    return cast(T, found)


def has_autograd_threads() -> bool:
    """Whether autograd has started a thread for each device; they have names of their own."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return False
    for task in tasks.iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:
            continue  # the thread has ended
        if name.startswith("pt_autograd"):
            return True
    return False


def _has_threads() -> bool:
    return threading.active_count() > 1 or has_autograd_threads()


def _answer_and_exit(function: Callable[[], Any], writer: int) -> NoReturn:
    try:
        text = pickle.dumps((False, function()))
    except BaseException as error:  # noqa: BLE001 - it is raised again in the parent
        text = _pickled_error(error)
    with open(writer, "wb") as answer:
        answer.write(text)
    os._exit(0)


def _pickled_error(error: BaseException) -> bytes:
    """The exception; its type and text where it cannot be read back."""
    try:
        text = pickle.dumps((True, error))
        pickle.loads(text)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - of whatever kind
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((True, plain))
    return text
