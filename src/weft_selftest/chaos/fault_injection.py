"""Injection of planned faults into a rank, for `weft chaos`: real signals, limits, sockets and files.

    launch(..., Supervision(adapt_attempt=FaultInjection(plan).adapt))
      rank: InjectingStatus.on_phase, .started, .finished ---> a planned fault ---> the ledger, then the fault

Only the caller of `launch` can pass a plan: no config key, environment variable or file of a run
does. A rank without a plan has a plain `RankStatus`, and no code of this module runs in it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.folder import checkpoints
from weft.comm.local_peers import is_name_of_rank
from weft.comm.transport import Call
from weft.run.private_folder import CLEANER_NAME
from weft.run.rank_status import Phase, RankStatus, ShownCall
from weft.run.world import Attempt
from weft_selftest.chaos.fault_plan import (
    MESSAGE_PHASES,
    FaultKind,
    FaultPlan,
    PlannedFault,
    cause_of_start,
)

NUM_STEPS_ACTIVE = 2
"""Steps after which a full or slow disk and a slow link are as before."""
SLOW_WRITE_S = 0.15
SLOW_CALL_S = 0.01
MEMORY_MARGIN_BYTES = 2**26
MIN_MESSAGE_NUMEL = 16
NUM_MANTISSA_BITS = 4
"""Bits of a number's second byte that are of the mantissa in every dtype."""
PAUSE_S = 6.0
STOPPED_S = 30.0
FULL_S = 4.0
CLOCK_JUMP_S = 86_400.0 * 365
CALLS_BEFORE_START_FAULT = 2
"""Calls of a start after which its fault happens: connections exist then."""


class InjectedError(RuntimeError):
    """An exception that a fault plan asks for."""


@dataclass(frozen=True)
class FaultInjection:
    """Replaces the status of a rank by one that injects the faults of a plan."""

    plan: FaultPlan

    def adapt(self, rank: int, attempt: Attempt) -> Attempt:
        """The attempt of a rank, with its faults; called in the rank."""
        restart = attempt.restart
        number = 0 if restart is None else restart.number
        injector = _Injector(self.plan, rank, number, attempt.memory_folder)
        if rank == 0 and restart is not None:
            injector.record({"detected_at_s": restart.at_s})
        status = InjectingStatus(attempt.status, injector)
        return replace(attempt, status=status)


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """What ranks have recorded, in order, without a line that is being written."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="ascii").split("\n")
    return [json.loads(line) for line in lines]


class InjectingStatus(RankStatus):
    """A rank's status that injects planned faults where it is reported."""

    def __init__(self, status: RankStatus, injector: _Injector) -> None:
        super().__init__(status.slot)
        self._injector = injector
        self._call: ShownCall | None = None

    def on_phase(self, step: int, phase: Phase) -> None:
        """Report the phase, then inject what is planned for it."""
        super().on_phase(step, phase)
        self._injector.on_phase(step, phase)

    def started(self, call: ShownCall) -> int:
        """Report the call; in a start, inject what is planned for it."""
        position = super().started(call)
        self._injector.on_call(self.place)
        return position

    def waiting(self, call: ShownCall, position: int) -> None:
        """Remember the call, whose buffer may be corrupted."""
        self._call = call
        super().waiting(call, position)

    def finished(self) -> None:
        """Report the end of the wait; corrupt what was received, if that is planned."""
        super().finished()
        call, self._call = self._call, None
        if isinstance(call, Call):
            self._injector.on_received(call, self.place)


class _Injector:
    """The faults of one rank in one attempt."""

    def __init__(
        self, plan: FaultPlan, rank: int, attempt: int, memory_folder: Path | None
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.attempt = attempt
        self.folders: tuple[Path, ...]
        if memory_folder is None:
            self.folders = (plan.run_folder,)
        else:
            self.folders = (memory_folder, plan.run_folder)
        done = {line["fault"] for line in read_ledger(plan.ledger) if "fault" in line}
        self.due = [fault for fault in plan.faults if self._is_mine(fault, done)]
        self.num_calls = 0
        self.call_delay_s = 0.0
        self.has_resumed = False
        self.corrupts_next: PlannedFault | None = None
        self._undo: list[tuple[int, Callable[[], None]]] = []

    def _is_mine(self, fault: PlannedFault, done: set[int]) -> bool:
        if fault.rank != self.rank or fault.number in done:
            return False
        if fault.phase != "start":
            return True
        cause = cause_of_start(fault, self.plan.faults)
        return cause is None or cause.number in done

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to the ledger in one call, also while the disk is full."""
        text = json.dumps({"attempt": self.attempt, **line}) + "\n"
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        _, most = limits
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        file = os.open(self.plan.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def on_phase(self, step: int, phase: Phase) -> None:
        """End the faults that have lasted long enough; inject those that are due."""
        if self.rank == 0 and phase == "data" and not self.has_resumed:
            self.has_resumed = True
            self.record({"resumed_at_s": time.monotonic(), "step": step})
        for ending in tuple(self._undo):
            last_step, undo = ending
            if step >= last_step:
                self._undo.remove(ending)
                undo()
        for fault in tuple(self.due):
            is_in_phase = fault.phase == phase != "start"
            if is_in_phase and step >= self.plan.first_step(fault):
                self._begin(fault, step, phase)

    def on_call(self, place: tuple[int, Phase]) -> None:
        """Delay a call over a slow link; inject what is due in a start."""
        if self.call_delay_s:
            time.sleep(self.call_delay_s)
        step, phase = place
        if phase != "start":
            return
        self.num_calls += 1
        if self.num_calls == CALLS_BEFORE_START_FAULT:
            for fault in tuple(self.due):
                if fault.phase == "start":
                    self._begin(fault, step, phase)

    def on_received(self, call: Call, place: tuple[int, Phase]) -> None:
        """Flip a bit of a reduced gradient, if that is due."""
        fault = self.corrupts_next
        step, phase = place
        if fault is None or phase not in MESSAGE_PHASES:
            return
        buffer = call.output
        is_gradient = (
            call.op == "all_reduce"
            and buffer is not None
            and buffer.is_floating_point()
            and buffer.numel() >= MIN_MESSAGE_NUMEL
            and set(call.axis.split("+")) <= set(self.plan.reduced_axes)
        )
        if buffer is not None and is_gradient:
            self.corrupts_next = None
            self._record_fault(fault, step, phase)
            flip_bit(buffer, random.Random(fault.number))  # noqa: S311 - no secret

    def _begin(self, fault: PlannedFault, step: int, phase: Phase) -> None:
        self.due.remove(fault)
        if fault.kind == "corrupted_message":
            self.corrupts_next = fault
            return
        self._record_fault(fault, step, phase)
        _EFFECTS[fault.kind](self, step)

    def _record_fault(self, fault: PlannedFault, step: int, phase: Phase) -> None:
        has_updated = phase in ("evaluate", "save", "end")
        num_done = step if has_updated else max(0, step - 1)
        self.record({"fault": fault.number, "at_s": time.monotonic(), "num_done": num_done})

    def kill(self, step: int) -> None:
        """SIGKILL, as by the kernel when memory is used up."""
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_two(self, step: int) -> None:
        """SIGKILL to another rank and to this one, at once."""
        for other in _other_ranks()[:1]:
            os.kill(other, signal.SIGKILL)
        self.kill(step)

    def exit(self, step: int) -> None:
        """End with exit code 0, as user code may."""
        os._exit(0)

    def lose_folder(self, step: int) -> None:
        """Remove the temporary folder of the launcher, as a cleaner of such folders does; SIGKILL."""
        for folder in self.folders[:-1]:  # the one in memory, which has the same name
            shutil.rmtree(Path(tempfile.gettempdir(), folder.name), ignore_errors=True)
        self.kill(step)

    def replace_data(self, step: int) -> None:
        """Replace the data by a copy with the same bytes, so that it is verified again; SIGKILL."""
        source = self.plan.source
        if source is not None:
            copy = source.with_name(f"{source.name}.{os.getpid()}")
            shutil.copyfile(source, copy)
            copy.replace(source)
        self.kill(step)

    def pause(self, step: int) -> None:
        """Sleep once, as in a compilation, an allocation or on a slow file system."""
        time.sleep(PAUSE_S)

    def stop_launcher(self, step: int) -> None:
        """SIGSTOP to the launcher, SIGCONT after a while, in which this rank waits."""
        launcher = os.getppid()
        os.kill(launcher, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(launcher, signal.SIGCONT)

    def fill_disk_at_end(self, step: int) -> None:
        """No file can grow for some seconds, in which the last step is to be saved."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        undo = threading.Timer(FULL_S, resource.setrlimit, [resource.RLIMIT_FSIZE, before])
        undo.daemon = True
        undo.start()

    def stop(self, step: int) -> None:
        """SIGSTOP: the process is there and does nothing."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def segfault(self, step: int) -> None:
        """Read address 0."""
        ctypes.string_at(0)

    def exception(self, step: int) -> None:
        """Raise an exception in this rank."""
        raise InjectedError(f"injected at step {step}")

    def out_of_memory(self, step: int) -> None:
        """Allocate more than the address space of the process may grow by."""
        sizes = Path("/proc/self/statm").read_text(encoding="ascii").split()
        num_pages = sizes[0]
        used_bytes = int(num_pages) * os.sysconf("SC_PAGE_SIZE")
        limit_bytes = used_bytes + MEMORY_MARGIN_BYTES
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, most))
        torch.empty(2**34, dtype=torch.uint8)

    def full_disk(self, step: int) -> None:
        """No file can grow: writes fail with EFBIG, which counts as a full disk."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        _, most = before
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))

        def undo() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

        self._later(step, undo)

    def slow_disk(self, step: int) -> None:
        """Every flush to the disk takes longer."""
        before = os.fsync

        def fsync(file: Any) -> None:
            time.sleep(SLOW_WRITE_S)
            before(file)

        setattr(os, "fsync", fsync)  # noqa: B010 - mypy rejects the assignment
        self._later(step, lambda: setattr(os, "fsync", before))

    def lost_link(self, step: int) -> None:
        """Shut down every connection to another rank; in shared memory, those by which it is seen."""
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                _shut_down(int(name))

    def slow_link(self, step: int) -> None:
        """Every call takes longer."""
        self.call_delay_s = SLOW_CALL_S
        self._later(step, lambda: setattr(self, "call_delay_s", 0.0))

    def corrupt_files(self, step: int) -> None:
        """Flip a bit of the newest snapshot and of the newest checkpoint, then SIGKILL."""
        for folder in self.folders:
            for _, path in checkpoints(folder):
                with suppress(OSError):  # another rank removes it just now
                    _flip_bit_of_file(path)
                break
        self.kill(step)

    def clock(self, step: int) -> None:
        """The wall clock of the process jumps: back on even ranks, ahead on odd ones."""
        jump_s = CLOCK_JUMP_S if self.rank % 2 else -CLOCK_JUMP_S
        jump_ns = int(1e9 * jump_s)
        wall_s = time.time
        wall_ns = time.time_ns

        def jumped_s() -> float:
            return wall_s() + jump_s

        def jumped_ns() -> int:
            return wall_ns() + jump_ns

        setattr(time, "time", jumped_s)  # noqa: B010 - mypy rejects the assignment
        setattr(time, "time_ns", jumped_ns)  # noqa: B010

    def _later(self, step: int, undo: Callable[[], None]) -> None:
        self._undo.append((step + NUM_STEPS_ACTIVE, undo))


_EFFECTS: dict[FaultKind, Callable[[_Injector, int], None]] = {
    "kill": _Injector.kill,
    "kill_two": _Injector.kill_two,
    "exit": _Injector.exit,
    "full_disk_at_end": _Injector.fill_disk_at_end,
    "lost_folder": _Injector.lose_folder,
    "replaced_data": _Injector.replace_data,
    "pause": _Injector.pause,
    "stopped_launcher": _Injector.stop_launcher,
    "stop": _Injector.stop,
    "segfault": _Injector.segfault,
    "exception": _Injector.exception,
    "out_of_memory": _Injector.out_of_memory,
    "full_disk": _Injector.full_disk,
    "slow_disk": _Injector.slow_disk,
    "lost_link": _Injector.lost_link,
    "slow_link": _Injector.slow_link,
    "corrupted_file": _Injector.corrupt_files,
    "clock": _Injector.clock,
}


def _other_ranks() -> list[int]:
    """Processes of the other local ranks: children of the launcher with a process group of their own."""
    launcher = os.getppid()
    listed = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii")
    found: list[int] = []
    for pid in map(int, listed.split()):
        with suppress(OSError):
            is_cleaner = Path(f"/proc/{pid}/comm").read_bytes().strip() == CLEANER_NAME
            if pid != os.getpid() and os.getpgid(pid) == pid and not is_cleaner:
                found.append(pid)
    return found


def flip_bit(buffer: Tensor, draw: random.Random) -> None:
    """Flip one of the upper bits of the mantissa of the largest element.

    A flip in a gradient of zero is no more than a denormal number, which is flushed to zero.
    """
    flat = buffer.detach()
    element = int(flat.abs().argmax())
    size = buffer.element_size()
    byte = size * element + max(0, size - 2)
    flat.view(torch.uint8)[byte] ^= 1 << draw.randrange(NUM_MANTISSA_BITS)


def _shut_down(file: int) -> None:
    """Shut down a connected TCP socket, or one to a rank on this host; other files raise OSError."""
    connection = socket.socket(fileno=os.dup(file))
    with connection:
        peer = connection.getpeername()
        is_to_local_rank = connection.family == socket.AF_UNIX and is_name_of_rank(peer)
        if connection.family in (socket.AF_INET, socket.AF_INET6) or is_to_local_rank:
            connection.shutdown(socket.SHUT_RDWR)


def _flip_bit_of_file(checkpoint: Path) -> None:
    """Flip a bit near the end of the largest file of a checkpoint."""
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-8, os.SEEK_END)
        file.write(bytes([byte ^ 16]))
