"""Profile of some steps of a run: starts and ends the recorder of each rank, and writes its records when the steps are done."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from weft.checkpoint.disk import replace_file
from weft.comm.text import broadcast_text
from weft.errors import counted
from weft.profiler.clocks import clock_of, clock_offset
from weft.profiler.profile_folder import CONFIG_FILE, FOLDER, PLAN_FILE, new_profile_folder
from weft.profiler.ranges import NamedRanges
from weft.profiler.rank_recorder import RankRecorder
from weft.profiler.rank_records import RecordHeader, file_name
from weft.run.rank_status import OnPhase, Phase
from weft.train.step import TrainStep
from weft.train.step_phases import report_blocks


class StepProfiler:
    """Records this rank in some steps; every rank has one and makes the same calls.

    The records of steps that follow each other are one profile: where the run goes back to a
    checkpoint, the next one begins.

    Args:
        steps: their numbers, the first step is 1.
        files: name -> text of the files that describe the run.
    """

    def __init__(
        self, step: TrainStep, steps: range, *, run_folder: Path, files: Mapping[str, str]
    ) -> None:
        self._step = step
        self._steps = steps
        self._run_folder = run_folder
        self._files = {name: files[name] for name in (CONFIG_FILE, PLAN_FILE)}
        self._recorder: RankRecorder | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._header: RecordHeader | None = None
        self._last = 0
        self._writers: list[threading.Thread] = []

    def observed(self, on_phase: OnPhase | None) -> OnPhase:
        """A callback that records phases, and passes them on."""

        def observe(step: int, phase: Phase) -> None:
            if on_phase is not None:
                on_phase(step, phase)
            if self._recorder is not None:
                self._recorder.phase(step, phase)

        return observe

    def before_step(self, number: int) -> Iterator[dict[str, Any]]:
        """Start or end the recording where that is due; yields a note. Every rank must call it."""
        if self._recorder is not None and (number not in self._steps or number != self._last + 1):
            yield self._end()
        if number in self._steps and self._recorder is None:
            self._start(number)
        self._last = number

    def close(self) -> Iterator[dict[str, Any]]:
        """End the recording, if it has not ended, and wait until it is written."""
        if self._recorder is not None:
            yield self._end()
        for writer in self._writers:
            writer.join()

    def _start(self, number: int) -> None:
        """Begin to record; every rank must call it."""
        comm = self._step.model.comm
        folder = ""
        if comm.rank == 0:
            folder = self._new_folder()
        profile = int(broadcast_text(comm, folder) or 0)
        if not profile:
            self._steps = range(0)
            return
        offset = clock_offset(comm)
        self._header = RecordHeader(
            profile=profile,
            rank=comm.rank,
            mesh=comm.mesh.text,
            first=number,
            end=self._steps.stop,
            host=socket.gethostname(),
            clock="cuda" if comm.device.type == "cuda" else "host",
            offset_s=offset.seconds,
            offset_error_s=offset.error_s,
        )
        ranges = NamedRanges(comm.device)
        self._recorder = RankRecorder(clock_of(comm.device), ranges)
        self._hooks = report_blocks(self._step.model.blocks, self._recorder.block)
        comm.barrier_world()  # so that no rank waits in its first step for the start of another
        comm.recorder = self._recorder
        self._step.player.action_recorder = self._recorder

    def _new_folder(self) -> str:
        """On rank 0 the number of the new profile; empty where the disk takes none."""
        try:
            folder = new_profile_folder(self._run_folder)
            for name, text in self._files.items():
                replace_file(folder / name, text)
        except OSError as error:
            _warn(self._run_folder / FOLDER, error)
            return ""
        return folder.name

    def _end(self) -> dict[str, Any]:
        """End the recording, and write it in a thread, beside the steps that follow."""
        recorder, header = self._recorder, self._header
        assert recorder is not None
        assert header is not None
        self._step.model.comm.recorder = None
        self._step.player.action_recorder = None
        for hook in self._hooks:
            hook.remove()
        recorder.close()
        self._recorder = None
        folder = self._run_folder / FOLDER / str(header.profile)
        writer = threading.Thread(
            target=_write, args=(recorder, header, folder), name="profile writer"
        )
        writer.start()
        self._writers.append(writer)
        num_steps = self._last - header.first + 1
        text = (
            f"profile: {counted(num_steps, 'step')} from step {header.first} recorded in {folder}"
        )
        return {
            "event": "note",
            "text": f"{text}; see weft trace {shlex.quote(str(self._run_folder))}",
        }


def _write(recorder: RankRecorder, header: RecordHeader, folder: Path) -> None:
    """Write the records of a rank; a disk that does not take them stops nothing."""
    try:
        os.makedirs(folder, exist_ok=True)  # on another host than that of rank 0
        replace_file(folder / file_name(header.rank), recorder.records(header).to_text())
    except OSError as error:
        _warn(folder, error)


def _warn(folder: Path, error: OSError) -> None:
    sys.stderr.write(f"warning: {folder}: the profile is not written: {error.strerror}\n")
