"""Measured against predicted steps of five layouts on this machine.

    weft bench compute --ranks 2 --write two.toml && weft bench comm --mesh dp2 --write two.toml
    weft bench compute --ranks 4 --write four.toml && weft bench comm --mesh dp4 --write four.toml
    python -m benchmarks.traces two.toml four.toml [OUT]

Prints a table for docs/trace.md: the step, the bubble and exposed communication, and how far actions are from their
prediction. The files are of 2 and 4 ranks at once on this machine; the runs stay in OUT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = range(8, 18)
MODEL = "--model.layers 4 --data.seq_len 128 --batch.global_size 16 --batch.micro_size 2"
LAYOUTS = {
    "pp2, 1f1b": "--mesh pp2",
    "pp2 dp2, 1f1b": "--mesh pp2 dp2",
    "pp4, zero_bubble": "--mesh pp4 --pipeline.schedule zero_bubble",
    "dp4, ZeRO 3": "--mesh dp4 --parallel.zero 3",
    "tp2 cp2": "--mesh tp2 cp2",
}
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


def traced(name: str, flags: str, hardware: str, out: Path) -> dict[str, Any]:
    """Train a layout, and what `weft trace` says of it."""
    folder = out / name.replace(", ", "-").replace(" ", "-")
    weft(
        "train",
        *(*flags.split(), *MODEL.split()),
        *("--steps", str(STEPS.stop), "--profile", f"{STEPS.start}:{STEPS.stop}"),
        *("--prove.before", "never", "--save.at_end", "False", "--out", str(folder)),
    )
    weft("trace", str(folder), "--hardware", hardware, "--json", str(folder / "trace.json"))
    weft("trace", str(folder), "--hardware", hardware, "--html", str(folder / "trace.html"))
    answer: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return answer


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


def main() -> None:
    two, four, *others = sys.argv[1:]
    out = Path(others[0] if others else "runs/traces")
    load = os.getloadavg()[0]
    rows = [
        row(name, traced(name, flags, two if flags == "--mesh pp2" else four, out))
        for name, flags in LAYOUTS.items()
    ]
    for cells in (TITLES, ["---"] * len(TITLES), *rows):
        print(f"| {' | '.join(cells)} |")
    print(f"load of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
