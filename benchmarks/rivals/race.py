"""Timing of two sides in turns (A B A B ...) in the same processes, in seconds of the clock and of the CPU.

Machines drift and other programs run: each of weft's turns is held against the turn of torch's beside it, and the median of
those ratios counts. CPU seconds are user + system of all threads of all ranks; what others run disturbs them less.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from benchmarks.rivals.course import Step

from weft.comm.comm import Comm

LOSS_TOLERANCE = 1e-5
"""Relative; float32 sums in another order, carried through all steps of a race."""


@dataclass
class Laps:
    """What one side took for each turn, seconds a step, and the losses that it came to."""

    clock_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """How many times as fast weft is: the median over pairs of turns, and the quarters below and above it."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(torchs: list[float], wefts: list[float]) -> Ratio:
        """From seconds of neighbouring turns."""
        ratios = [theirs / ours for theirs, ours in zip(torchs, wefts, strict=True)]
        return Ratio(*statistics.quantiles(ratios, n=4))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def race(sides: Mapping[str, Step], comm: Comm, *, rounds: int, steps: int) -> dict[str, Laps]:
    """Every side plays `steps` steps a turn, one side after the other, `rounds` times after one turn to warm up."""
    laps = {name: Laps() for name in sides}
    for number in range(rounds + 1):
        for name, step in sides.items():
            clock_s, cpu_s, loss = _turn(step, comm, steps)
            laps[name].losses.append(loss)
            if number:
                laps[name].clock_s.append(clock_s)
                laps[name].cpu_s.append(cpu_s)
    return laps


def _turn(step: Callable[[], float], comm: Comm, steps: int) -> tuple[float, float, float]:
    """Seconds a step: the slowest rank's by the clock, all ranks' together of the CPU; the last loss."""
    everyone = tuple(name for name, _ in comm.mesh.axes)
    comm.barrier(everyone)
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = step()
    mine = torch.tensor([time.perf_counter() - clock, time.process_time() - cpu], dtype=torch.float64)
    both = comm.all_gather(mine.unsqueeze(0), everyone) / steps
    return both[:, 0].max().item(), both[:, 1].sum().item(), loss


def report(title: str, tokens: int, laps: Mapping[str, Laps]) -> str:
    """One line a side of weft's: its ratios to the first side, which is torch's."""
    rival, *ours = laps
    torchs, lines = laps[rival], []
    for name in ours:
        clock = Ratio.of(torchs.clock_s, laps[name].clock_s)
        cpu = Ratio.of(torchs.cpu_s, laps[name].cpu_s)
        theirs_ps, ours_ps = (tokens / statistics.median(side.clock_s) for side in (torchs, laps[name]))
        lines.append(
            f"{title:9} | {rival:44} | {name:36} | {theirs_ps:7,.0f} {ours_ps:7,.0f} tokens/s | {clock} by the clock"
            f" | {cpu} of the CPU | losses within {_apart(torchs, laps[name]):.0e} | load {os.getloadavg()[0]:.1f}"
        )
    return "\n".join(lines)


def _apart(torchs: Laps, wefts: Laps) -> float:
    """Largest relative difference of the losses; both sides must have computed the same.

    Raises:
        AssertionError: they did not.
    """
    apart = max(abs(a - b) / abs(a) for a, b in zip(torchs.losses, wefts.losses, strict=True))
    assert apart < LOSS_TOLERANCE, f"not the same training: losses {torchs.losses} and {wefts.losses}"
    return apart
