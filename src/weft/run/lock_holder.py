"""The process that holds a lock: its identity on one machine, and whether it runs. Imports no torch."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"


@dataclass(frozen=True)
class LockHolder:
    """The process that writes into a run folder: the launcher of local ranks, or rank 0 of a joined
    world.

    Attributes:
        machine: boot id and pid namespace, within which `pid` means one process.
        process_start: start of the process, clock ticks since boot.
        nonce: random name of this lock.
        started_at: UTC, ISO 8601.
        job: name of the torchrun or Slurm job; "" for local runs.
        status_board: path of the status board on `host`, if there is one.
    """

    host: str
    machine: str
    pid: int
    process_start: int
    nonce: str
    started_at: str
    job: str = ""
    status_board: str | None = None

    @staticmethod
    def this_process(job: str = "") -> LockHolder:
        """The holder that this process is."""
        pid = os.getpid()
        return LockHolder(
            host=os.uname().nodename,
            machine=_machine(),
            pid=pid,
            process_start=_start_of(pid) or 0,
            nonce=secrets.token_hex(16),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            job=job,
        )

    @staticmethod
    def from_text(text: str) -> LockHolder | None:
        """The holder that the text of a lock file states; None if it states none."""
        try:
            stored = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(stored, dict):
            return None
        values: dict[str, Any] = {}
        for field in fields(LockHolder):
            value = stored.get(field.name)
            allowed = int if field.name in ("pid", "process_start") else str
            is_missing = field.name == "status_board" and value is None
            if type(value) is not allowed and not is_missing:
                return None
            values[field.name] = value
        return LockHolder(**values)

    def is_on_this_machine(self) -> bool:
        """Whether `pid` can be looked up here."""
        return self.machine == _machine()

    def is_on_this_kernel(self) -> bool:
        """Whether the process is on this kernel, perhaps in another container."""
        boot = self.machine.partition(" ")[0]
        return boot == _boot() != UNKNOWN

    def is_running(self) -> bool:
        """Whether the process runs; only on its own machine."""
        if self.pid <= 0:
            return False
        start = _start_of(self.pid)
        if start is not None:
            # the same number may be another process by now, which has started later
            return start == self.process_start
        try:  # /proc may hide the processes of other users
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except (ProcessLookupError, OverflowError):
            return False
        return not os.path.isdir("/proc/self")


def _machine() -> str:
    """Boot id and pid namespace of this process."""
    namespace = UNKNOWN
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{_boot()} {namespace}"


def _boot() -> str:
    """Id of this boot of the kernel."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return UNKNOWN


def _start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it does not run (or is hidden)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    is_zombie = words[0] in ("Z", "X")
    return None if is_zombie else int(words[19])
