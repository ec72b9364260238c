"""State of a process or thread of this machine, from /proc: stopped, starved of CPU time, or blocked by its terminal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STOPPED, TRACED, WAITS_FOR_DEVICE = "T", "t", "D"

# Numbers of system calls on x86-64 and on arm64.
WRITE_CALLS = ("1", "20", "64", "66")
"""write and writev."""
READ_CALLS = ("0", "63")
"""read."""
SELECT_CALLS = ("23", "270", "72")
"""select and pselect6."""
INPUT = 0
OUTPUTS = (1, 2)


@dataclass(frozen=True)
class ProcessState:
    """One look at a process or thread.

    Attributes:
        state: letter of /proc/PID/stat: R runs, S sleeps, D waits for a device, T is stopped, t is
            traced by a debugger; "" if it is unknown.
        cpu_wait_ns: thread -> time that it has been ready to run and waited for a core.
        is_held_by_terminal: whether its main thread waits for the reader of its stdout or stderr,
            or a thread for the writer of stdin (a breakpoint).
    """

    state: str = ""
    cpu_wait_ns: tuple[tuple[int, int], ...] = ()
    is_held_by_terminal: bool = False

    def starved_ns(self, before: ProcessState) -> int:
        """The longest time that one thread has waited for a core since `before`."""
        earlier = dict(before.cpu_wait_ns)
        longest_ns = 0
        for thread, wait_ns in self.cpu_wait_ns:
            # a thread that was not there before has waited for an unknown part of the interval: none of it counts
            longest_ns = max(longest_ns, wait_ns - earlier.get(thread, wait_ns))
        return longest_ns


def process_state(pid: int) -> ProcessState:
    """The state of a process; unknown where /proc does not show it."""
    folder = Path("/proc", str(pid))
    try:
        state = _state_letter(folder)
        threads = os.listdir(folder / "task")
    except OSError:
        return ProcessState()
    waits: list[tuple[int, int]] = []
    for thread in threads:
        wait_ns = _cpu_wait_ns(folder / "task" / thread)
        waits.append((int(thread), wait_ns))
    call = _system_call(folder)
    return ProcessState(state, tuple(waits), call.is_writing_output)


def thread_state(native_id: int) -> ProcessState:
    """The state of one thread of this process; unknown where /proc does not show it."""
    folder = Path("/proc/self/task", str(native_id))
    try:
        state = _state_letter(folder)
    except OSError:
        return ProcessState()
    waits = ((native_id, _cpu_wait_ns(folder)),)
    call = _system_call(folder)
    return ProcessState(state, waits, call.is_writing_output or call.is_reading_input)


def _state_letter(folder: Path) -> str:
    text = (folder / "stat").read_text(encoding="ascii", errors="replace")
    # behind the last bracket: the name of a process may hold brackets and spaces
    return text.rpartition(")")[2].split()[0]


def _cpu_wait_ns(folder: Path) -> int:
    try:
        words = (folder / "schedstat").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(words[1])


@dataclass(frozen=True)
class _SystemCall:
    """The system call that a thread is in: its number and first argument; "" and -1 if none."""

    number: str
    argument: int

    @property
    def is_writing_output(self) -> bool:
        """A terminal may be held by Ctrl-S."""
        return self.number in WRITE_CALLS and self.argument in OUTPUTS

    @property
    def is_reading_input(self) -> bool:
        """A debugger waits for a command; it may wait with `select` for the descriptors below 1."""
        is_read = self.number in READ_CALLS and self.argument == INPUT
        is_select = self.number in SELECT_CALLS and self.argument == INPUT + 1
        return is_read or is_select


def _system_call(folder: Path) -> _SystemCall:
    try:
        words = (folder / "syscall").read_text(encoding="ascii").split()
    except OSError:
        return _SystemCall("", -1)
    if words[0] == "running":
        return _SystemCall("", -1)
    return _SystemCall(words[0], int(words[1], 16))
