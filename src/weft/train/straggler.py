"""Stragglers: ranks that work longer at a step than the ranks with the same pipeline stages.

    step time      |--- work ---|-- waits for other ranks --|-- work --|
    busy time      |------------|                           |----------|

Busy time is what a rank does between the ends of two steps (reading data, computing, saving), without
its waits for collectives and messages. In a synchronous step all ranks take equally long; only busy
time tells who the others wait for. Ranks of one pipeline stage have equal work; of different stages
not. Every `WINDOW` steps the ranks exchange their median busy time. On a host with more ranks than
cores no rank is reported.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weft.comm.comm import Comm
from weft.comm.observe import WaitClock
from weft.comm.text import all_gather_text
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.run.world import num_cores

WINDOW = 16
"""Steps between two exchanges; the first window of a run is not judged: it warms caches."""
NUM_WINDOWS = 2
"""Windows in a row in which a rank is slow before it is reported."""
MIN_EXCESS_S = 0.005
"""A rank that needs less than this longer than the others is not reported: it is not worth it."""


class StragglerWatch:
    """Measures this rank's busy time and reports slow ranks, each once.

    Args:
        factor: busy time over that of the others from which a rank is slow.
    """

    def __init__(self, comm: Comm, *, factor: float) -> None:
        self.comm = comm
        self.factor = factor
        self.clock = WaitClock()
        comm.wait_clock = self.clock
        self._busy_s: list[float] = []
        self._num_windows = 0
        self._slow_windows: defaultdict[int, int] = defaultdict(int)
        self._reported: set[int] = set()
        self._last_s = time.perf_counter()
        self._last_waited_s = 0.0

    def after_step(self, step: int) -> Iterator[dict[str, Any]]:
        """Record a step; yields the events of ranks that are slow. Every rank must call it."""
        self._busy_s.append(self._busy_since_last())
        if len(self._busy_s) < WINDOW:
            return
        median_s = statistics.median(self._busy_s)
        self._busy_s.clear()
        row = torch.tensor([median_s], dtype=torch.float64, device=self.comm.device)
        medians_s = self.comm.all_gather_world(row).tolist()
        self._num_windows += 1
        if self._num_windows == 1:
            return
        slow = self._newly_slow(medians_s)
        if not slow:
            return
        own_host = f"{socket.gethostname()} {num_cores()}"
        hosts = all_gather_text(self.comm, own_host)
        for rank, reference_s in slow.items():
            host, cores = hosts[rank].split()
            if hosts.count(hosts[rank]) > int(cores):
                continue  # its ranks take turns on the cores, which says nothing of any of them
            yield self._event(
                step, rank, host=host, busy_s=medians_s[rank], reference_s=reference_s
            )

    def _busy_since_last(self) -> float:
        now_s = time.perf_counter()
        waited_s = self.clock.waited_s
        elapsed_s = now_s - self._last_s
        waited_since_s = waited_s - self._last_waited_s
        self._last_s = now_s
        self._last_waited_s = waited_s
        return elapsed_s - waited_since_s

    def _newly_slow(self, medians_s: Sequence[float]) -> dict[int, float]:
        """Ranks that are slow for the last `NUM_WINDOWS` windows and not reported, with the busy
        time of the others.
        """
        slow: dict[int, float] = {}
        for rank, reference_s in references(medians_s, self.comm.mesh).items():
            busy_s = medians_s[rank]
            excess_s = busy_s - reference_s
            is_slow = busy_s > self.factor * reference_s and excess_s > MIN_EXCESS_S
            if is_slow:
                self._slow_windows[rank] += 1
            else:
                self._slow_windows[rank] = 0
            is_lasting = self._slow_windows[rank] >= NUM_WINDOWS
            if is_lasting and rank not in self._reported:
                self._reported.add(rank)
                slow[rank] = reference_s
        return slow

    def _event(
        self, step: int, rank: int, *, host: str, busy_s: float, reference_s: float
    ) -> dict[str, Any]:
        ratio = busy_s / reference_s
        coordinates = self.comm.mesh.coord_text(rank)
        text = (
            f"guard: step {step}: rank {rank} ({coordinates}) on {host} is slow: it works "
            f"{1000 * busy_s:.0f} ms a step, {ratio:.1f} times as long as ranks with the same layers "
            f"({1000 * reference_s:.0f} ms)"
        )
        return {
            "event": "guard",
            "kind": "straggler",
            "step": step,
            "action": "report",
            "rank": rank,
            "coordinates": coordinates,
            "host": host,
            "busy_s": busy_s,
            "others_s": reference_s,
            "ratio": ratio,
            "text": text,
        }


def references(busy_s: Sequence[float], mesh: Mesh) -> dict[int, float]:
    """For each rank the median of the other ranks with the same pipeline stages; without those that
    are alone.
    """
    peers: defaultdict[int, list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        peers[mesh.index(rank, pipeline_axis())].append(rank)
    found: dict[int, float] = {}
    for ranks in peers.values():
        if len(ranks) == 1:
            continue
        ordered = sorted(busy_s[rank] for rank in ranks)
        middle = len(ordered) // 2
        for rank in ranks:
            is_below = busy_s[rank] < ordered[middle]
            if is_below or len(ordered) % 2:
                place = middle
            else:
                place = middle - 1
            found[rank] = ordered[place]
    return found
