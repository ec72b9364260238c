"""Cost of the guards of a training step: CPU time of each beside that of the step, on one rank of the default job.

python -m benchmarks.guards [--mesh "dp2"] [any other key of weft train]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from weft.comm.comm import Comm
from weft.config.load import load
from weft.config.run import Run
from weft.config.schema import GuardConfig
from weft.data.dataset import open_data
from weft.models import FAMILIES
from weft.run.run_ranks import run_ranks
from weft.train.build import build_data_loader
from weft.train.build_training import build_step
from weft.train.digest import StateDigests
from weft.train.guard import StepGuard
from weft.train.straggler import StragglerWatch

NUM_STEPS = 24
NUM_WARM = 4


def main(words: list[str]) -> None:
    run = load(words, FAMILIES)

    def rank(comm: Comm) -> dict[str, float]:
        return measure(run, comm)

    results = run_ranks(
        run.device_mesh,
        rank,
        transport="processes",
        timeout_s=600,
    )
    costs_ms = results[0]
    step_ms = costs_ms["step"]
    print(f"{run.mesh or 'one rank'}: medians of {NUM_STEPS} steps, CPU ms on rank 0")
    for name, cost_ms in costs_ms.items():
        percent = 100 * cost_ms / step_ms
        print(f"  {name:<40} {cost_ms:9.3f}  {percent:6.2f}% of a step")


def measure(run: Run, comm: Comm) -> dict[str, float]:
    """Name -> CPU time, ms."""
    samples = open_data(run.data, run.model)
    step = build_step(run, comm)
    loader = build_data_loader(
        samples,
        comm,
        run.batch,
        seed=run.seed,
        later=run.model.reads_later_targets,
    )
    guard = StepGuard(GuardConfig(spike=3.0), loader, comm.mesh)
    digests = StateDigests(step.state(), every=1)
    stragglers = StragglerWatch(comm, factor=3.0)
    costs: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        start_s = time.process_time()
        result = act()
        costs.setdefault(name, []).append(1000 * (time.process_time() - start_s))
        return result

    for index in range(NUM_WARM + NUM_STEPS):
        batches = loader.batches(index)
        comm.checked = index < 2
        number = index + 1
        report = timed("step", partial(step, batches, lr=1e-3))
        timed("judge (not finite, spikes)", partial(guard.judge, number, report))
        timed("busy time and its exchange", partial(exhaust, stragglers.after_step(number)))
        timed("digests after the update", partial(digests.compare, number))
        timed("digests before the next update", digests.has_changed)
    return {name: statistics.median(values[NUM_WARM:]) for name, values in costs.items()}


def exhaust(events: Iterator[object]) -> None:
    """Consume an iterator."""
    for _ in events:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
