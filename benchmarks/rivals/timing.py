"""Timing of several training steps in turns (A B A B ...) in the same processes: wall-clock and CPU seconds.

Machines drift and other programs run: each turn of weft is compared with the neighbouring turn of torch, and the median of
those ratios is reported. CPU seconds are user + system of all threads of all ranks; other programs affect them less.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from benchmarks.rivals.training import Step

from weft.comm.comm import Comm

LOSS_TOLERANCE = 1e-5
"""Largest relative difference of losses: float32 sums in another order, accumulated over all steps of a comparison."""


class Turn(NamedTuple):
    """Seconds a step of one turn, and its last loss.

    Attributes:
        clock_s: wall-clock seconds of the slowest rank.
        cpu_s: CPU seconds of all ranks together.
    """

    clock_s: float
    cpu_s: float
    loss: float


@dataclass
class Timings:
    """Seconds a step of each measured turn of one side, and the losses of all its turns."""

    clock_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Speedup:
    """torch's time / weft's: median and quartiles over pairs of neighbouring turns."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(torch_s: Sequence[float], weft_s: Sequence[float]) -> Speedup:
        """From the seconds of neighbouring turns."""
        ratios = []
        for torch_turn_s, weft_turn_s in zip(torch_s, weft_s, strict=True):
            ratios.append(torch_turn_s / weft_turn_s)
        low, median, high = statistics.quantiles(ratios, n=4)
        return Speedup(low, median, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def time_in_turns(
    steps: Mapping[str, Step],
    comm: Comm,
    *,
    rounds: int,
    steps_per_turn: int,
) -> dict[str, Timings]:
    """Run `steps_per_turn` steps of each side in turn, `rounds` times after one round of warm-up."""
    timings = {name: Timings() for name in steps}
    for round_number in range(rounds + 1):
        is_warm_up = round_number == 0
        for name, step in steps.items():
            turn = _time_turn(step, comm, steps_per_turn)
            side = timings[name]
            side.losses.append(turn.loss)
            if not is_warm_up:
                side.clock_s.append(turn.clock_s)
                side.cpu_s.append(turn.cpu_s)
    return timings


def _time_turn(step: Step, comm: Comm, num_steps: int) -> Turn:
    all_axes = tuple(name for name, _ in comm.mesh.axes)
    comm.barrier(all_axes)
    clock_start = time.perf_counter()
    cpu_start = time.process_time()
    for _ in range(num_steps):
        loss = step()
    clock_s = time.perf_counter() - clock_start
    cpu_s = time.process_time() - cpu_start
    local = torch.tensor([[clock_s, cpu_s]], dtype=torch.float64)
    per_step = comm.all_gather(local, all_axes) / num_steps
    clock_by_rank, cpu_by_rank = per_step.unbind(1)
    slowest_s = clock_by_rank.max().item()
    total_cpu_s = cpu_by_rank.sum().item()
    return Turn(slowest_s, total_cpu_s, loss)


def format_report(
    title: str,
    tokens: int,
    timings: Mapping[str, Timings],
) -> str:
    """One line for each side of weft with its speed-ups over the first side, which is torch."""
    torch_name, *weft_names = timings
    torch_side = timings[torch_name]
    torch_speed = tokens / statistics.median(torch_side.clock_s)
    lines = []
    for name in weft_names:
        weft_side = timings[name]
        weft_speed = tokens / statistics.median(weft_side.clock_s)
        clock = Speedup.of(torch_side.clock_s, weft_side.clock_s)
        cpu = Speedup.of(torch_side.cpu_s, weft_side.cpu_s)
        difference = _check_losses(torch_side.losses, weft_side.losses)
        load = os.getloadavg()[0]
        columns = [
            f"{title:9}",
            f"{torch_name:44}",
            f"{name:39}",
            f"{torch_speed:7,.0f} {weft_speed:7,.0f} tokens/s",
            f"{clock} wall clock",
            f"{cpu} CPU",
            f"losses within {difference:.0e}",
            f"load {load:.1f}",
        ]
        lines.append(" | ".join(columns))
    return "\n".join(lines)


def _check_losses(torch_losses: Sequence[float], weft_losses: Sequence[float]) -> float:
    """Largest relative difference of the losses.

    Raises:
        AssertionError: it is above the tolerance, so the two sides did not run the same training.
    """
    differences = []
    for torch_loss, weft_loss in zip(torch_losses, weft_losses, strict=True):
        differences.append(abs(torch_loss - weft_loss) / abs(torch_loss))
    largest = max(differences)
    assert largest < LOSS_TOLERANCE, (
        f"not the same training: losses {torch_losses} and {weft_losses}"
    )
    return largest
