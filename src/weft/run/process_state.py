"""State of a process of this machine, from /proc: stopped, starved of CPU time, or blocked in writing its output."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STOPPED, TRACED, WAITS_FOR_DEVICE = "T", "t", "D"
WRITE_CALLS = ("1", "20", "64", "66")
"""Numbers of write and writev, on x86-64 and on arm64."""
OUTPUTS = (1, 2)


@dataclass(frozen=True)
class ProcessState:
    """One look at a process.

    Attributes:
        state: letter of /proc/PID/stat: R runs, S sleeps, D waits for a device, T is stopped, t is
            traced by a debugger; "" if it is unknown.
        cpu_wait_ns: thread -> time that it has been ready to run and waited for a core.
        is_writing_output: whether its main thread waits for the reader of its stdout or stderr.
    """

    state: str = ""
    cpu_wait_ns: tuple[tuple[int, int], ...] = ()
    is_writing_output: bool = False

    def starved_ns(self, before: ProcessState) -> int:
        """The longest time that one thread has waited for a core since `before`."""
        earlier = dict(before.cpu_wait_ns)
        longest_ns = 0
        for thread, wait_ns in self.cpu_wait_ns:
            longest_ns = max(longest_ns, wait_ns - earlier.get(thread, wait_ns))
        return longest_ns


def process_state(pid: int) -> ProcessState:
    """The state of a process; unknown where /proc does not show it."""
    folder = Path("/proc", str(pid))
    try:
        text = (folder / "stat").read_text(encoding="ascii", errors="replace")
        threads = os.listdir(folder / "task")
    except OSError:
        return ProcessState()
    state = text.rpartition(")")[2].split()[0]
    waits: list[tuple[int, int]] = []
    for thread in threads:
        wait_ns = _cpu_wait_ns(folder / "task" / thread / "schedstat")
        waits.append((int(thread), wait_ns))
    return ProcessState(state, tuple(waits), _is_writing_output(folder))


def _cpu_wait_ns(path: Path) -> int:
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(words[1])


def _is_writing_output(folder: Path) -> bool:
    """Whether the main thread is in a write to stdout or stderr: a terminal may be held by Ctrl-S."""
    try:
        words = (folder / "syscall").read_text(encoding="ascii").split()
    except OSError:
        return False
    return len(words) > 1 and words[0] in WRITE_CALLS and int(words[1], 16) in OUTPUTS
