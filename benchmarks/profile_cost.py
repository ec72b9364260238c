"""Cost of a profile: blocks of ten steps with and without it, in turns, in one run.

    python -m benchmarks.profile_cost [MESH] [STEPS]

Prints for each rank the median CPU time and wall time of a step with the recorder over those without it; the first
steps of each block, in which the recorder starts and the last records are written, are left out.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.cli import main
from weft.run.rank_status import OnPhase, Phase
from weft.train.step_profiler import StepProfiler

BLOCK = 10
LEFT_OUT = 2
"""First steps of a block."""


class ProfilerInTurns(StepProfiler):
    """Records every other block of steps, and keeps the times at which steps begin and end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: dict[int, list[float]] = {}

    def observed(self, on_phase: OnPhase | None) -> OnPhase:
        observe = super().observed(on_phase)

        def timed(step: int, phase: Phase) -> None:
            if phase in ("data", "end"):
                self.times.setdefault(step, []).extend((time.process_time(), time.perf_counter()))
            observe(step, phase)

        return timed

    def before_step(self, number: int) -> Iterator[dict[str, Any]]:
        is_on = number // BLOCK % 2 == 1
        if is_on and self._recorder is None:
            self._start(number)
        elif not is_on and self._recorder is not None:
            yield self._end()
        self._last = number

    def close(self) -> Iterator[dict[str, Any]]:
        yield from super().close()
        path = self._run_folder / f"times-{self._step.model.comm.rank}.json"
        path.write_text(json.dumps(self.times))


def ratios(times: dict[str, list[float]]) -> list[str]:
    """`cpu 1.003, wall 1.01`: medians with the recorder over those without."""
    found = []
    for name, column in (("cpu", 0), ("wall", 1)):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for step, marks in times.items():
            number = int(step)
            if number >= BLOCK and number % BLOCK >= LEFT_OUT and len(marks) >= 4:
                seconds[number // BLOCK % 2 == 1].append(marks[2 + column] - marks[column])
        on, off = statistics.median(seconds[True]), statistics.median(seconds[False])
        found.append(f"{name} {1e3 * off:.1f} -> {1e3 * on:.1f} ms, ratio {on / off:.4f}")
    return found


def measure(mesh: str, steps: str) -> None:
    """Train, and print the ratios of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        code = main(
            [
                *("train", "--mesh", mesh, "--steps", steps, "--profile", "2:3"),
                *("--prove.before", "never", "--save.at_end", "False", "--report", "False"),
                *("--out", str(out)),
            ]
        )
        assert code == 0
        for path in sorted(out.glob("times-*.json")):
            print(path.stem, "; ".join(ratios(json.loads(path.read_text()))))


if __name__ == "__main__":
    import weft.start.train_run

    weft.start.train_run.StepProfiler = ProfilerInTurns  # type: ignore[misc]
    measure(*(sys.argv[1:] + ["pp2 dp2 tp2", "200"][len(sys.argv) - 1 :]))
