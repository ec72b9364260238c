"""Times of repeated work on a device: wall time on the CPU, events of the stream on a GPU."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_ITERATIONS = 3
MAX_ITERATIONS = 1000


@dataclass(frozen=True)
class Times:
    """The seconds that every iteration took."""

    seconds: tuple[float, ...]

    @property
    def min_s(self) -> float:
        return min(self.seconds)

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def median_s(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2]


def num_iterations(one_s: float, budget_s: float) -> int:
    """How often work of `one_s` is repeated to take about `budget_s`, within bounds."""
    wanted = math.ceil(budget_s / max(one_s, 1e-9))
    return min(max(wanted, MIN_ITERATIONS), MAX_ITERATIONS)


def timed(work: Callable[[], object], iterations: int, device: torch.device) -> Times:
    """Run `work` one time after the other."""
    if device.type == "cuda":
        return _timed_on_stream(work, iterations, device)
    marks = [time.perf_counter()]
    for _ in range(iterations):
        work()
        marks.append(time.perf_counter())
    seconds = [end - start for start, end in itertools.pairwise(marks)]
    return Times(tuple(seconds))


def _timed_on_stream(work: Callable[[], object], iterations: int, device: torch.device) -> Times:
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    events[0].record(stream)
    for event in events[1:]:
        work()
        event.record(stream)
    torch.cuda.synchronize(device)
    milliseconds = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return Times(tuple(duration / 1e3 for duration in milliseconds))


def timed_for(work: Callable[[], object], budget_s: float, device: torch.device) -> Times:
    """Run `work` twice, then for about `budget_s`."""
    timed(work, 1, device)
    warm = timed(work, 1, device)
    return timed(work, num_iterations(warm.median_s, budget_s), device)
