"""The save of the last step: where no disk takes it, the state is kept in memory, and the disk is tried again for a while.

Every rank calls these functions at the same points; rank 0 looks at the disk, and decides.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.disk import free_bytes
from weft.checkpoint.folder import checkpoint_path, resume_command
from weft.checkpoint.kept import link_kept, new_kept_folder
from weft.checkpoint.saver import Saver
from weft.comm.text import broadcast_text
from weft.errors import Fault, LaunchError, SaveError
from weft.train.training import Event, Training
from weft.view.quantity import memory

RETRY_S = 2.0
"""Between two looks at a disk that has not taken the last step."""

# Note [A disk that is full at the end]
# The ranks hold the finished model, and no restart makes room: it would train the steps since the last checkpoint once more,
# to the same end. So the state goes into memory first, where nothing that happens to the ranks or to their launcher takes
# it, and then the ranks wait for room on the disk. A run that was asked to stop has no time to wait.


@dataclass(frozen=True)
class LastSave:
    """The save after the last step of a run.

    Attributes:
        outcome: of the run, for the error.
        wait_s: how long a disk is tried again.
        on_wait: called while the ranks wait.
    """

    saver: Saver
    run_folder: Path
    step: int
    outcome: str
    wait_s: float
    on_wait: Callable[[], None]

    def events(self) -> Iterator[Event]:
        """Save, and wait for the disk where it does not take the state.

        Raises:
            SaveError: on all ranks, if it is not saved in the end.
        """
        saver = self.saver
        for event in saver.finish(self.step, save=True):
            yield {**event, "is_last": True} if event["event"] == "save_failed" else event
        if not saver.error:
            return
        if self._is_committed():  # its copy at the URL of the run is missing
            raise SaveError(self._text())
        need_bytes = saver.total_bytes()
        kept = keep_state(saver, self.run_folder, self.step, need_bytes=need_bytes)
        where = broadcast_text(saver.comm, self._where(kept) if saver.comm.rank == 0 else "")
        if self.wait_s:
            yield self._waiting_note(where, need_bytes)
            yield from self._try_again(need_bytes)
        if saver.error:
            raise SaveError(f"{self._text()}. {where}")

    def _is_committed(self) -> bool:
        final = checkpoint_path(self.run_folder, self.step)
        return bool(broadcast_text(self.saver.comm, "yes" if final.is_dir() else ""))

    def _try_again(self, need_bytes: int) -> Iterator[Event]:
        """Save once there is room, until that succeeds or the time is up."""
        deadline_s = time.monotonic() + self.wait_s
        is_over = False
        while self.saver.error and not is_over:
            time.sleep(min(RETRY_S, self.wait_s))
            self.on_wait()
            is_late = time.monotonic() >= deadline_s or self.saver.stop_requested()
            has_room = free_bytes(self.run_folder) >= need_bytes
            # Rank 0 decides, by its disk and its clock: ranks that decided apart would meet other collectives.
            choice = broadcast_text(self.saver.comm, f"{'room' * has_room} {'end' * is_late}")
            is_over = "end" in choice
            if "room" in choice:
                for event in self.saver.finish(self.step, save=True, again=True):
                    if event["event"] != "save_failed":  # the note says so already
                        yield event

    def _waiting_note(self, where: str, need_bytes: int) -> Event:
        text = (
            f"warning: no room for step {self.step}: clear {memory(need_bytes)} on the disk of "
            f"{self.run_folder}; it is tried again for {self.wait_s:g} s (save.wait_s). {where}"
        )
        return {"event": "note", "text": text}

    def _text(self) -> str:
        return (
            f"{self.outcome} after step {self.step}, which could not be saved: {self.saver.error}"
        )

    def _where(self, kept: str) -> str:
        """Where the state is, and how to go on from it; rank 0 links it into the run folder."""
        command = resume_command(self.run_folder)
        if not kept:
            return f"It is kept nowhere else: no memory has room for it. Go on: {command}"
        is_linked = link_kept(checkpoint_path(self.run_folder, self.step), Path(kept))
        if not is_linked:
            command = command.replace("--resume auto", f"--resume {kept}")
        return f"It is kept in memory until this machine ends: {kept}. Go on: {command}"


def keep_state(saver: Saver, run_folder: Path, step: int, *, need_bytes: int) -> str:
    """Keep the state in memory: the path of its checkpoint there, or ""; every rank must call it."""
    comm = saver.comm
    found = new_kept_folder(run_folder, need_bytes=need_bytes) if comm.rank == 0 else None
    name = broadcast_text(comm, str(found or ""))
    if not name:
        return ""
    folder = Path(name)
    keeper = saver.into(folder)
    with suppress(OSError):
        folder.mkdir(mode=0o700)  # on other machines, which send their files to rank 0
    for _ in keeper.finish(step, save=True):
        pass
    keeper.close()
    if keeper.error or comm.rank in keeper.separate:
        shutil.rmtree(folder, ignore_errors=True)
    return "" if keeper.error else str(checkpoint_path(folder, step))


def check_room(training: Training) -> None:
    """Check that a checkpoint fits on the disk of a run that saves; every rank must call it before
    the first step.

    Raises:
        LaunchError: on all ranks, if it does not.
    """
    saver = training.saver
    run_folder = training.run_folder
    if not (training.save_at_end or saver.every):
        return
    need_bytes = saver.total_bytes()
    free = int(broadcast_text(saver.comm, str(free_bytes(run_folder))))
    if free >= need_bytes:
        return
    raise LaunchError(
        Fault(
            "out",
            f"no checkpoint fits on the disk of {run_folder}",
            got=f"{free:,} bytes free",
            need=f"{need_bytes:,} bytes",
            fix="free disk space, or choose another --out",
        )
    )
