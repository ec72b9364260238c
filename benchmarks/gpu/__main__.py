"""All checks on one GPU, in less than 25 minutes: `make gpu`. Exit code 0: all as it must be; 1: not; 2: no GPU.

python -m benchmarks.gpu                # on cuda:0, every section in a process of its own
python -m benchmarks.gpu --rehearse     # tiny, on the CPU, in this process
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.report import Report, Row, Settings, rows_of
from benchmarks.gpu.supervise import run_section

MINUTES = 22
TITLES = (
    "environment",
    "commands",
    "layouts on one device",
    "process groups",
    "deterministic mode",
    "attention",
    "saves",
    "speed",
    "switches",
    "profile",
)


def rehearse(report: Report, folder: Path) -> None:
    """All sections in this process."""
    from benchmarks.gpu.sections import SECTIONS

    settings = Settings(device="cpu", is_rehearsal=True, folder=folder)
    for title in TITLES:
        report.begin(title)
        for check in SECTIONS[title](settings):
            for row in rows_of(check, settings):
                report.add(title, row)


def run_on_gpu(report: Report, folder: Path, until_s: float) -> None:
    """Every section in processes of its own."""
    for title in TITLES:
        report.begin(title)
        if time.monotonic() >= until_s:
            report.add(title, Row(title, "left out: no time left", is_ok=False))
            continue

        def command(first: int, lines: Path, section: str = title) -> list[str]:
            worker = [sys.executable, "-m", "benchmarks.gpu.worker"]
            return [*worker, section, str(first), str(lines), str(folder)]

        start_s = time.monotonic()
        for row in run_section(command, folder, until_s=until_s):
            report.add(title, row)
        print(f"      {time.monotonic() - start_s:.1f} s", flush=True)


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    from weft.run.devices import find_gpus

    return find_gpus().num_visible > 0


def main() -> int:
    """Run the sections, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny checks on the CPU")
    parser.add_argument("--json", type=Path, help="file for all rows; default: runs/gpu.json")
    arguments = parser.parse_args()
    if not arguments.rehearse and not has_gpu():
        print("no GPU: nothing was checked; --rehearse runs tiny checks on the CPU")
        return 2
    report = Report()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        if arguments.rehearse:
            rehearse(report, Path(name))
        else:
            until_s = start_s + 60 * MINUTES
            run_on_gpu(report, Path(name), until_s)
    path = arguments.json
    if path is None and not arguments.rehearse:
        path = Path("runs/gpu.json")
    if path is not None:
        report.write(path)
        print(f"\nall rows: {path}")
    minutes = (time.monotonic() - start_s) / 60
    kind = "rehearsal on the CPU" if arguments.rehearse else "GPU"
    print(f"\n{kind}: {len(report.rows)} rows, {len(report.failures)} failed, {minutes:.1f} min")
    for row in report.failures:
        print(row)
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
