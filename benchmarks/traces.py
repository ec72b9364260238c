"""Measured against predicted steps of five layouts on this machine.

    weft bench compute --ranks 2 --write two.toml && weft bench comm --mesh dp2 --write two.toml
    weft bench compute --ranks 4 --write four.toml && weft bench comm --mesh dp4 --write four.toml
    python -m benchmarks.traces two.toml four.toml [OUT]

Prints two tables for docs/trace.md. Five layouts beside their prediction: the step, the bubble and exposed
communication, and how far actions are from it; the files are of 2 and 4 ranks at once on this machine. And pipelines
whose stages sleep in proportion to their FLOPs, beside their schedule: sleeping ranks need no core, so the machine's
load does not matter. The runs stay in OUT.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.cli import main as program
from weft.parallel.pipeline.player import Player, StepState
from weft.schedule.actions import Act

STEPS = range(8, 18)
MODEL = "--model.layers 4 --data.seq_len 128 --batch.global_size 16 --batch.micro_size 2"
LAYOUTS = {
    "pp2, 1f1b": "--mesh pp2",
    "pp2 dp2, 1f1b": "--mesh pp2 dp2",
    "pp4, zero_bubble": "--mesh pp4 --pipeline.schedule zero_bubble",
    "dp4, ZeRO 3": "--mesh dp4 --parallel.zero 3",
    "tp2 cp2": "--mesh tp2 cp2",
}
SLEEPING = {
    "pp2, 1f1b": "--mesh pp2",
    "pp2 dp2, 1f1b": "--mesh pp2 dp2",
    "pp4, 1f1b": "--mesh pp4",
    "pp4, zero_bubble": "--mesh pp4 --pipeline.schedule zero_bubble",
    "pp2, interleaved": "--mesh pp2 --pipeline.schedule interleaved --pipeline.chunks 2",
}
SMALL = (
    "--model.layers 4 --model.dim 16 --model.heads 2 --model.kv_heads 2 --model.ffn 32 --data.seq_len 8"
    " --batch.global_size 16 --batch.micro_size 2"
)
UNIT_S = 0.04
"""Sleep of the mean forward of a stage."""
SLEEPING_TITLES = (
    "stages that sleep",
    "step",
    "its schedule",
    "bubble",
    "its schedule",
    "largest difference of an action",
)
TITLES = (
    "layout",
    "step",
    "predicted",
    "bubble",
    "predicted",
    "communication in actions",
    "predicted",
    "actions: median ratio",
    "range",
)


def weft(*words: str) -> None:
    """Run the program, as a user would."""
    subprocess.run([sys.executable, "-m", "weft", *words], check=True, stdout=subprocess.DEVNULL)


def training(flags: str, model: str, folder: Path) -> tuple[str, ...]:
    """The words of a profiled run."""
    return (
        *("train", *flags.split(), *model.split()),
        *("--steps", str(STEPS.stop), "--profile", f"{STEPS.start}:{STEPS.stop}"),
        *("--prove.before", "never", "--save.at_end", "False", "--out", str(folder)),
    )


def folder_of(out: Path, name: str) -> Path:
    return out / name.replace(", ", "-").replace(" ", "-")


def traced(folder: Path, *words: str) -> dict[str, Any]:
    """What `weft trace` says of a run."""
    weft("trace", str(folder), *words, "--json", str(folder / "trace.json"))
    weft("trace", str(folder), *words)
    answer: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return answer


def measured(name: str, flags: str, hardware: str, out: Path) -> list[str]:
    """Train a layout; its row."""
    folder = folder_of(out, name)
    weft(*training(flags, MODEL, folder))
    return row(name, traced(folder, "--hardware", hardware))


def slept(name: str, flags: str, out: Path) -> list[str]:
    """Train a pipeline whose stages sleep; its row."""
    folder = folder_of(out / "sleeping", name)
    words = (sys.executable, "-m", "benchmarks.traces", *training(flags, SMALL, folder))
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    trace = traced(folder)
    differences = [each for each in trace["differences"] if each["name"][1:].isdecimal()]
    worst = max(differences, key=lambda each: abs(each["measured_s"] - each["predicted_s"]))
    return [
        name,
        milliseconds(trace["step_s"]),
        milliseconds(trace["predicted"]["step_s"]),
        percent(trace["bubble"]),
        percent(trace["predicted"]["bubble"]),
        f"{worst['name']}: {milliseconds(worst['measured_s'])}, {milliseconds(worst['predicted_s'])}",
    ]


def train_asleep(words: list[str]) -> None:
    """`weft train` with actions that sleep behind their computation."""
    run_action = Player._run_action

    def run_and_sleep(player: Player, state: StepState, act: Act) -> None:
        run_action(player, state, act)
        time.sleep(UNIT_S * player.model.plan.action_units(act))

    Player._run_action = run_and_sleep  # type: ignore[method-assign]
    sys.exit(program(words))


def row(name: str, trace: dict[str, Any]) -> list[str]:
    """The row of a layout."""
    predicted = trace["predicted"]
    ratios = sorted(
        each["measured_s"] / each["predicted_s"]
        for each in trace["differences"]
        if each["name"][1:].isdecimal()
    )
    exposed = [each for each in trace["exposed"] if each["axis"] not in ("world", "pp")]
    measured_s = sum(each["in_actions"] for each in exposed)
    return [
        name,
        milliseconds(trace["step_s"]),
        milliseconds(predicted["step_s"]),
        percent(trace["bubble"]),
        percent(predicted["bubble"]),
        milliseconds(measured_s),
        milliseconds(sum(predicted["exposed_s"].values())),
        f"{ratios[len(ratios) // 2]:.2f}",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
    ]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def show(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table, a row as soon as it is known."""
    for cells in itertools.chain((titles, ["---"] * len(titles)), rows):
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print both tables."""
    two, four, *others = sys.argv[1:]
    out = Path(others[0] if others else "runs/traces")
    load = os.getloadavg()[0]
    layouts = LAYOUTS.items()
    show(
        TITLES,
        (
            measured(name, flags, two if flags == "--mesh pp2" else four, out)
            for name, flags in layouts
        ),
    )
    print()
    show(SLEEPING_TITLES, (slept(name, flags, out) for name, flags in SLEEPING.items()))
    print(f"load of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train_asleep(sys.argv[1:])
    main()
