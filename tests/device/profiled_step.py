"""A profiled step on the fake CUDA device: its events and NVTX ranges as one JSON line.

Run: python -m tests.device.profiled_step NUMBER, which is that of a layout of tests/device/layouts.py.
"""

# ruff: noqa: E402

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter

ctypes.CDLL(os.environ["WEFT_FAKE_CUDA"])

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.device.fake_device import (
    DEVICE,
    Recorder,
    RecordingTransport,
    batches_of,
    even_expert_loads,
    prepare_torch,
)
from tests.device.layouts import LAYOUTS, Layout
from tests.device.streams import Streams, cuda_streams
from weft.comm.comm import Comm
from weft.config.load import load
from weft.models import FAMILIES
from weft.profiler.clocks import CudaClock, clock_of
from weft.profiler.ranges import NamedRanges
from weft.profiler.rank_recorder import RankRecorder
from weft.profiler.rank_records import RecordHeader
from weft.train import build_training
from weft.train.step_phases import report_blocks


class FakeTimer:
    """The device's time: the n-th event that is recorded comes n milliseconds after the first one.

    Attributes:
        calls: of events, by name.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def event_type(self, plain: type) -> type:
        """Events that have a time, and are otherwise those of `plain`."""
        timer = self

        class TimedEvent(plain):
            def __init__(self, *, enable_timing: bool = False) -> None:
                super().__init__()
                self.is_timed = enable_timing

            def record(self, stream=None) -> None:
                super().record(stream)
                if self.is_timed:
                    self.at_ms = timer.calls["record"]
                    timer.calls["record"] += 1

            def synchronize(self) -> None:
                if self.is_timed:
                    timer.calls["synchronize"] += 1
                super().synchronize()

            def elapsed_time(self, other) -> float:
                return float(other.at_ms - self.at_ms)

        return TimedEvent


class OpenRanges:
    """NVTX ranges: each with the ones that are open around it."""

    def __init__(self) -> None:
        self.opened: list[list[str]] = []
        self.now: list[str] = []

    def push(self, name: str) -> None:
        """Open a range."""
        self.now.append(name)
        self.opened.append(list(self.now))

    def pop(self) -> None:
        """Close the innermost one."""
        self.now.pop()


def profiled(layout: Layout) -> dict[str, object]:
    """What the profile of the third step of a layout records."""
    run = load(layout.flags(), FAMILIES)
    recorder, streams, timer, ranges = Recorder(), Streams(), FakeTimer(), OpenRanges()
    mesh = run.device_mesh
    steps = build_training.step_groups(run)
    transport = RecordingTransport(mesh, layout.rank, steps=steps, device=DEVICE, streams=streams)
    comm = Comm(mesh, layout.rank, transport)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        step = build_training.build_step(run, comm)
        batches = batches_of(run, comm)
    with fake_mode, recorder, cuda_streams(streams), even_expert_loads(recorder):
        torch.cuda.Event = timer.event_type(torch.cuda.Event)
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = ranges.push, ranges.pop
        step(batches, lr=1e-3)
        comm.checked = False
        plain = _waits(step, batches, recorder, on_phase=None)
        clock = clock_of(DEVICE)
        profile = RankRecorder(clock, NamedRanges(DEVICE))
        hooks = report_blocks(step.model.blocks, profile.block)
        comm.recorder = step.player.action_recorder = profile
        before = timer.calls.copy()
        waits = _waits(step, batches, recorder, on_phase=lambda phase: profile.phase(2, phase))
        during = timer.calls - before
        comm.recorder = step.player.action_recorder = None
        for hook in hooks:
            hook.remove()
        profile.close()
    header = RecordHeader(1, layout.rank, mesh.text, 2, 3, "here", "cuda")
    records = profile.records(header)
    return {
        "is_cuda_clock": isinstance(clock, CudaClock),
        "events": during["record"],
        "event_waits": during["synchronize"],
        "read": timer.calls["synchronize"] - before["synchronize"],
        "waits": waits,
        "plain_waits": plain,
        "actions": [[each.name, each.start, each.end] for each in records.actions],
        "phases": [[each.name, each.start] for each in records.phases],
        "num_calls": len(records.calls),
        "ranges": ranges.opened,
        "open": ranges.now,
    }


def _waits(step, batches, recorder: Recorder, *, on_phase) -> dict[str, int]:
    """Places where the host waits for the device in a step."""
    recorder.syncs.clear()
    recorder.is_recording = True
    step(batches, lr=1e-3, on_phase=on_phase)
    recorder.is_recording = False
    return dict(recorder.syncs)


if __name__ == "__main__":
    prepare_torch()
    print(json.dumps(profiled(LAYOUTS[int(sys.argv[1])])))  # noqa: T201
