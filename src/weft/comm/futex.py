"""Waiting for words of shared memory to change, and waking those that wait: Linux futexes, called through ctypes."""

from __future__ import annotations

import ctypes
import errno
import platform
import time
from collections.abc import Sequence
from typing import NamedTuple

# Note [Futexes]
# A futex is a word of 32 bits in memory that processes share. `wait` sleeps in the kernel while the word has the value
# that was seen last; if it has changed before the kernel looks, it returns at once, so no wake-up is lost. `wake` wakes
# all that sleep at a word, through any mapping of it. Counters here have 64 bits, so that they never start again; the
# kernel looks at their lower half, which comes first on the processors below.

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of the system call, on processors whose words begin with their lower half."""
SYS_FUTEX_WAITV = 449
"""Waits for one of several words; since Linux 5.16, and not in every sandbox."""
FUTEX_WAIT, FUTEX_WAKE = 0, 1
FUTEX2_SIZE_U32 = 2
MAX_WORDS = 128
EVERYONE = 2**31 - 1
ONE_OF_SEVERAL_S = 0.001
"""How long to sleep at the first of several words where the kernel cannot wait for all of them."""


class SeenWord(NamedTuple):
    """A counter in shared memory, and the value that was seen last."""

    address: int
    value: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class _WaitedWord(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


_NUMBER = SYS_FUTEX.get(platform.machine(), 0)
_SYSCALL = ctypes.CDLL(None, use_errno=True).syscall
_SYSCALL.restype = ctypes.c_long
_SYSCALL.argtypes = (ctypes.c_long,) * 7
_WITHOUT_WAITV = (errno.ENOSYS, errno.EPERM)


def has_futexes() -> bool:
    """Whether this system has them."""
    return platform.system() == "Linux" and _NUMBER > 0


def wake(address: int) -> None:
    """Wake all that wait at a word."""
    _SYSCALL(_NUMBER, address, FUTEX_WAKE, EVERYONE, 0, 0, 0)


def wait(words: Sequence[SeenWord], timeout_s: float) -> None:
    """Sleep until one of the words may have changed, for at most `timeout_s`; the caller looks."""
    if len(words) > 1 and _wait_for_one(words[:MAX_WORDS], timeout_s):
        return
    if len(words) > 1:
        timeout_s = min(timeout_s, ONE_OF_SEVERAL_S)
    timespec = _timespec(timeout_s)
    address, value = words[0]
    low_half = value & 0xFFFFFFFF
    _SYSCALL(_NUMBER, address, FUTEX_WAIT, low_half, ctypes.addressof(timespec), 0, 0)


def _wait_for_one(words: Sequence[SeenWord], timeout_s: float) -> bool:
    """Sleep until one of several words may have changed; False where the kernel has no such call."""
    waiters = (_WaitedWord * len(words))(
        *(_WaitedWord(word.value & 0xFFFFFFFF, word.address, FUTEX2_SIZE_U32, 0) for word in words)
    )
    deadline = _timespec(time.monotonic() + timeout_s)
    status = _SYSCALL(
        SYS_FUTEX_WAITV,
        ctypes.addressof(waiters),
        len(words),
        0,
        ctypes.addressof(deadline),
        time.CLOCK_MONOTONIC,
        0,
    )
    return not (status < 0 and ctypes.get_errno() in _WITHOUT_WAITV)


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int(1e9 * (seconds - whole)))
