"""Real runs of four CPU ranks against the simulation that is calibrated on this machine: ranking of layouts, bubbles.

    PYTHONPATH=src:. python -m benchmarks.cpu_truth [--repeats 3] [--steps 3] [--folder runs/cpu-truth]

Four ranks share the cores, so a rank alone would be faster than beside three others, which no device is. While a rank waits
for others, a process of its own spins: each rank has the same share of the cores at all times, and is a device of that
speed. What is assumed: the scheduler of the operating system divides the cores evenly, and gloo's threads take little.

1. `weft bench compute` and `weft bench comm` write the figures of the machine with four ranks.
2. The 24 short runs of `weft plan --calibrate`, with four ranks, give the constants. None has the sizes of the layouts below.
3. Eight layouts of one model and global batch run in turns (A B C ... A B C ...); medians over all steps count.
4. `weft explain --hardware FILE` predicts each; the exit code is 1 if a claim does not hold.

Actions that are equal do not take equally long on shared cores, and ranks wait for the slower ones. So bubbles are simulated
with the jitter that equal actions have, as `weft simulate --jitter` does: the spread of their durations in the measured steps,
without waits, and apart from what a whole step is slower. A bubble is that of one pipeline, mean of its replicas, in both.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.comm.group_queue import GroupCall
from weft.config.hardware import find_hardware
from weft.config.load import load
from weft.config.run import Run
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.models import FAMILIES
from weft.parallel.pipeline.player import Player, StepState
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import measure
from weft.planner.simulate.predict import predict
from weft.planner.simulate.speeds import Speeds
from weft.run.devices import choose_device
from weft.run.launch import launch
from weft.run.rank_setup import open_comm
from weft.run.world import World
from weft.schedule.actions import Act
from weft.schedule.timeline import Span, Timeline, bubble
from weft.train.build_training import build_step
from weft.view.quantity import short_time
from weft_plan.calibration.fit import fit
from weft_plan.calibration.measured_steps import MeasuredStep
from weft_plan.commands.calibrate import runs_of
from weft_plan.commands.calibrate_options import CalibrateOptions
from weft_plan.commands.calibrate_run import example_batches, report, start_of, write_constants
from weft_plan.simulation.jitter import replicas_of, step_distribution

RANKS = 4
WARM_UP = 2
LR = 1e-4
MODEL = (
    "--model.layers 8 --model.dim 192 --model.heads 8 --model.kv_heads 8 --data.seq_len 128"
    " --batch.global_size 16"
)
LAYOUTS = {
    "dp4": "--mesh dp4 --batch.micro_size 4",
    "dp4 zero 3": "--mesh dp4 --batch.micro_size 1 --parallel.zero 3",
    "tp4": "--mesh tp4 --batch.micro_size 4",
    "pp4 1f1b": "--mesh pp4 --batch.micro_size 2",
    "pp4 zero_bubble": "--mesh pp4 --batch.micro_size 2 --pipeline.schedule zero_bubble",
    "dp2 tp2, recompute": "--mesh dp2_tp2 --batch.micro_size 2 --parallel.recompute full",
    "pp2 dp2": "--mesh pp2_dp2 --batch.micro_size 2",
    "dp2 cp2 zero 2": "--mesh dp2_cp2 --batch.micro_size 2 --parallel.zero 2",
}
LEAST_CORRELATION = 0.9
MOST_BUBBLE_POINTS = 0.05
SPINNER_SLEEP_S = 5e-4
DRAWS = 400


def run_of(words: str) -> Run:
    """The run of flags; "_" stands for a space in a value."""
    found = []
    for word in words.split():
        found.append(word.replace("_", " ") if "p2_" in word else word)
    return load([*found, "--device", "cpu"], FAMILIES)


# -- ranks with equal shares of the cores --------------------------------------------------------


@contextmanager
def spinning_while_waiting() -> Iterator[None]:
    """Between begin and end of every wait of this rank for others, a process spins."""
    is_waiting = mmap.mmap(-1, 1)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _spin(is_waiting, parent)
    wait = GroupCall.wait

    def spinning_wait(call: GroupCall) -> None:
        is_waiting[0] = 1
        try:
            wait(call)
        finally:
            is_waiting[0] = 0

    GroupCall.wait = spinning_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        GroupCall.wait = wait  # type: ignore[method-assign]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _spin(is_waiting: mmap.mmap, parent: int) -> None:
    while os.getppid() == parent:
        while is_waiting[0]:
            pass
        time.sleep(SPINNER_SLEEP_S)
    os._exit(0)


class TimedPlayer(Player):
    """A player that notes when its actions compute, without waits for messages before them."""

    spans: list[Span]

    def _run_action(self, state: StepState, act: Act) -> None:
        source = self.table.source(act)
        if source in state.recvs:  # wait, and hand the tensor on
            state.outputs[source] = state.recvs.pop(source).wait()
        start = time.perf_counter()
        super()._run_action(state, act)
        end = time.perf_counter()
        span = Span(self.rank, str(act), act.kind, start, end)
        self.spans.append(span)


def timed_rank(runs: Sequence[Run], num_steps: int, folder: Path, world: World) -> None:
    """Entry point of a rank: time the steps of runs on one mesh, and write them to a file."""
    device = choose_device("cpu", world)
    found: list[dict[str, Any]] = []
    with spinning_while_waiting(), open_comm(world, runs[0].device_mesh, device) as comm:
        for run in runs:
            step = build_step(run, comm)
            sync = step.grads.set_requires_gradient_sync
            player = TimedPlayer(step.model, before_last_backward=sync)
            step.player = player
            batches = example_batches(MeasuredRun.of(run), comm)
            steps = []
            for number in range(WARM_UP + num_steps):
                comm.checked = number < WARM_UP
                player.spans = []
                begin = time.perf_counter()
                step(batches, lr=LR)
                seconds = time.perf_counter() - begin
                spans = [(span.rank, span.start, span.end) for span in player.spans]
                steps.append({"seconds": seconds, "spans": spans})
            found.append({"steps": steps[WARM_UP:]})
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


@dataclass(frozen=True)
class TimedStep:
    """A step of all ranks.

    Attributes:
        bubble: idle share of a pipeline's ranks between its first and its last action, mean of the
            replicas.
        durations: seconds of the actions of each rank, in order.
    """

    seconds: float
    bubble: float
    durations: tuple[tuple[float, ...], ...]


def timed(runs: Sequence[Run], num_steps: int, folder: Path) -> list[list[TimedStep]]:
    """The steps of each run, of one mesh."""
    folder.mkdir(parents=True, exist_ok=True)
    main = partial(timed_rank, runs, num_steps, folder)
    code = launch(main, RANKS, device="cpu", mesh=runs[0].device_mesh)
    if code:
        raise SystemExit(code)
    by_rank = []
    for rank in range(RANKS):
        by_rank.append(json.loads((folder / f"{rank}.json").read_text()))
    found = []
    for number, run in enumerate(runs):
        pipelines = pipelines_of(run.device_mesh)
        steps = []
        for place in range(num_steps):
            parts = [of_rank[number]["steps"][place] for of_rank in by_rank]
            steps.append(_whole_step(parts, pipelines))
        found.append(steps)
    return found


def pipelines_of(mesh: Mesh) -> list[list[int]]:
    """The ranks of each pipeline."""
    axis = pipeline_axis()
    groups = set()
    for rank in range(mesh.size):
        groups.add(tuple(mesh.group(rank, (axis,))))
    return [list(group) for group in sorted(groups)]


def _whole_step(
    parts: Sequence[Mapping[str, Any]], pipelines: Sequence[Sequence[int]]
) -> TimedStep:
    seconds = max(part["seconds"] for part in parts)
    bubbles = []
    for ranks in pipelines:
        spans = []
        for row, rank in enumerate(ranks):
            for _, start, end in parts[rank]["spans"]:
                spans.append(Span(row, "", "F", start, end))
        timeline = Timeline(tuple(spans), len(ranks), "measured")
        bubbles.append(bubble(timeline))
    durations = []
    for part in parts:
        durations.append(tuple(end - start for _, start, end in part["spans"]))
    return TimedStep(seconds, statistics.mean(bubbles), tuple(durations))


def action_jitter(steps: Sequence[TimedStep]) -> float:
    """Standard deviation of the duration of equal actions (of one rank, at one place of its row),
    as a share; a factor that all actions of a step have in common is no jitter.
    """
    by_step = []
    for step in steps:
        by_step.append([math.log(each) for own in step.durations for each in own])
    num_steps = len(by_step)
    of_actions = [sum(logs) / num_steps for logs in zip(*by_step, strict=True)]
    squares = 0.0
    for logs in by_step:
        excess = [log - mean for log, mean in zip(logs, of_actions, strict=True)]
        of_step = sum(excess) / len(excess)
        squares += sum((each - of_step) ** 2 for each in excess)
    num_actions = len(of_actions)
    freedom = (num_steps - 1) * (num_actions - 1)
    return math.sqrt(squares / freedom)


# -- calibration --------------------------------------------------------------------------------


def write_figures(path: Path) -> None:
    """The figures of the machine with as many ranks as run."""
    path.unlink(missing_ok=True)
    operations = "all_reduce,all_gather,reduce_scatter,send_recv"
    sizes = ["--operations", operations, "--largest", "4MB"]
    weft = [sys.executable, "-m", "weft", "bench"]
    compute = [*weft, "compute", "--ranks", str(RANKS), "--write", str(path)]
    comm = [*weft, "comm", "--mesh", f"dp{RANKS}", *sizes, "--write", str(path)]
    for command in (compute, comm):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def calibrate(path: Path, num_steps: int, folder: Path) -> str:
    """Fit the constants to the short runs, write them, and report."""
    words = runs_of(CalibrateOptions(ranks=RANKS))
    runs = [load([*each, "--device", "cpu"], FAMILIES) for each in words]
    seconds = median_step_seconds(runs, num_steps, folder)
    measured = []
    for each, run, own_s in zip(words, runs, seconds, strict=True):
        roles = measure(MeasuredRun.of(run))
        measured.append(MeasuredStep(" ".join(each), roles, own_s))
    hardware = find_hardware(str(path))
    start = start_of(hardware.efficiency, is_cuda=False)
    found = fit(measured, hardware, source="", start=start)
    write_constants(str(path), found, num_runs=len(measured))
    return report(found)


def median_step_seconds(runs: Sequence[Run], num_steps: int, folder: Path) -> list[float]:
    """Of each run; runs on one mesh share one start of its ranks."""
    numbers_by_mesh: dict[str, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        numbers_by_mesh[run.mesh].append(number)
    seconds = [0.0] * len(runs)
    for numbers in numbers_by_mesh.values():
        of_mesh = timed([runs[number] for number in numbers], num_steps, folder)
        for number, steps in zip(numbers, of_mesh, strict=True):
            seconds[number] = statistics.median(step.seconds for step in steps)
    return seconds


# -- comparison ---------------------------------------------------------------------------------


def rank_correlation(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Spearman's, of distinct values."""
    count = len(measured)
    places = [_places(values) for values in (measured, predicted)]
    squares = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1))


def _places(values: Sequence[float]) -> list[int]:
    ordered = sorted(values)
    return [ordered.index(value) for value in values]


def compare(path: Path, num_repeats: int, num_steps: int, folder: Path) -> dict[str, Any]:
    """Run the layouts in turns, and put their predictions beside them."""
    runs = {name: run_of(f"{MODEL} {flags}") for name, flags in LAYOUTS.items()}
    steps: dict[str, list[TimedStep]] = defaultdict(list)
    for _ in range(num_repeats):
        for name, run in runs.items():
            steps[name].extend(timed([run], num_steps, folder)[0])
    speeds = Speeds(find_hardware(str(path)))
    rows = []
    for name, run in runs.items():
        own = steps[name]
        jitter = action_jitter(own) if run.pipeline_size > 1 else 0.0
        prediction = predict(MeasuredRun.of(run), speeds)
        drawn = step_distribution(
            prediction.step, replicas_of(prediction.roles), jitter=jitter, draws=DRAWS, seed=0
        )
        rows.append(
            {
                "layout": name,
                "has_pipeline": run.pipeline_size > 1,
                "measured_s": statistics.median(step.seconds for step in own),
                "shortest_s": min(step.seconds for step in own),
                "longest_s": max(step.seconds for step in own),
                "predicted_s": prediction.step_s.mid,
                "low_s": prediction.step_s.low,
                "high_s": prediction.step_s.high,
                "measured_bubble": statistics.median(step.bubble for step in own),
                "jitter": jitter,
                "predicted_bubble": drawn.mean_bubble,
                "bubble_without_jitter": prediction.step.bubble,
            }
        )
    correlation = rank_correlation(
        [row["measured_s"] for row in rows], [row["predicted_s"] for row in rows]
    )
    return {"rows": rows, "correlation": correlation}


def table(outcome: Mapping[str, Any]) -> str:
    """The comparison for a reader."""
    lines = [
        "layout               measured  (shortest, longest)  predicted  error    bubble, predicted"
        " (without jitter; jitter)"
    ]
    for row in outcome["rows"]:
        error = row["predicted_s"] / row["measured_s"] - 1
        times = [short_time(row[name]) for name in ("measured_s", "shortest_s", "longest_s")]
        line = f"{row['layout']:<20} {times[0]:>8}  {times[1]:>8} {times[2]:>8}"
        line += f"     {short_time(row['predicted_s']):>8}  {100 * error:+5.0f}%"
        if row["has_pipeline"]:
            line += (
                f"    {100 * row['measured_bubble']:5.1f}% {100 * row['predicted_bubble']:5.1f}%"
                f" ({100 * row['bubble_without_jitter']:.1f}%; {100 * row['jitter']:.0f}%)"
            )
        lines.append(line)
    lines.append(f"Spearman's rank correlation: {outcome['correlation']:.2f}")
    return "\n".join(lines)


def failures(outcome: Mapping[str, Any]) -> list[str]:
    """Claims that do not hold."""
    found = []
    if outcome["correlation"] < LEAST_CORRELATION:
        found.append(f"rank correlation below {LEAST_CORRELATION}")
    for row in outcome["rows"]:
        difference = abs(row["measured_bubble"] - row["predicted_bubble"])
        if row["has_pipeline"] and difference > MOST_BUBBLE_POINTS:
            found.append(f"bubble of {row['layout']} differs by {100 * difference:.1f} points")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="turns of all layouts")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a run in each turn")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/cpu-truth"),
        help="where constants, logs and outcome.json are written",
    )
    parser.add_argument("--hardware", type=Path, help="a calibrated file; default: calibrate")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    path = args.hardware
    if path is None:
        path = args.folder / "four-ranks.toml"
        write_figures(path)
        print(calibrate(path, args.steps, args.folder), flush=True)
        print(f"wrote {path} after {time.monotonic() - begin:.0f} s", flush=True)
    outcome = compare(path, args.repeats, args.steps, args.folder)
    (args.folder / "outcome.json").write_text(json.dumps(outcome, indent=1))
    print(table(outcome))
    missed = failures(outcome)
    for text in missed:
        print(f"NOT HELD: {text}")
    print(f"{time.monotonic() - begin:.0f} s in all; {args.folder}/outcome.json")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
