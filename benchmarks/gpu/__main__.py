"""All checks on one GPU, in less than 25 minutes: `make gpu`. Exit code 0: all as it must be; 1: not; 2: no GPU.

python -m benchmarks.gpu                # on cuda:0, every section in a process of its own
python -m benchmarks.gpu --rehearse     # tiny, on the CPU, in this process
python -m benchmarks.gpu --only speed   # some sections

Sections that judge numbers run at the same time; those of speed follow, one after the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.report import Report, Row, Settings, rows_of
from benchmarks.gpu.supervise import run_section

MINUTES = 22
NUMBERS = (
    "environment",
    "commands",
    "layouts in float64",
    "layouts in float32",
    "layouts in bfloat16",
    "process groups",
    "deterministic mode",
    "attention",
    "saves",
)
SPEED = ("product", "speed", "switches", "profile")
TITLES = (*NUMBERS, *SPEED)


def rehearse(report: Report, folder: Path, titles: Sequence[str]) -> None:
    """Sections in this process."""
    from benchmarks.gpu.sections import SECTIONS

    settings = Settings(device="cpu", is_rehearsal=True, folder=folder)
    for title in titles:
        report.begin(title)
        for check in SECTIONS[title](settings):
            for row in rows_of(check, settings):
                report.add(title, row)


def run_on_gpu(report: Report, folder: Path, titles: Sequence[str], until_s: float) -> None:
    """Sections in processes of their own."""
    numbers = [title for title in titles if title in NUMBERS]
    with ThreadPoolExecutor(len(TITLES)) as pool:
        found = pool.map(lambda title: section_rows(title, folder, until_s), numbers)
        for title, rows in zip(numbers, found, strict=True):
            report.begin(title)
            for row in rows:
                report.add(title, row)
    for title in titles:
        if title in SPEED:
            report.begin(title)
            for row in section_rows(title, folder, until_s):
                report.add(title, row)


def section_rows(title: str, folder: Path, until_s: float) -> list[Row]:
    """The rows of one section, and the time that it took."""
    if time.monotonic() >= until_s:
        return [Row(title, "left out: no time left", is_ok=False)]

    def command(first: int, lines: Path) -> list[str]:
        worker = [sys.executable, "-m", "benchmarks.gpu.worker"]
        return [*worker, title, str(first), str(lines), str(folder)]

    start_s = time.monotonic()
    rows = list(run_section(command, folder, until_s=until_s))
    return [*rows, Row("time of this section", f"{time.monotonic() - start_s:.1f} s")]


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    from weft.run.devices import find_gpus

    return find_gpus().num_visible > 0


def main() -> int:
    """Run the sections, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny checks on the CPU")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=TITLES, help="sections")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which none begins")
    parser.add_argument("--json", type=Path, help="file for all rows; default: runs/gpu.json")
    arguments = parser.parse_args()
    if not arguments.rehearse and not has_gpu():
        print("no GPU: nothing was checked; --rehearse runs tiny checks on the CPU")
        return 2
    report = Report()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        if arguments.rehearse:
            rehearse(report, Path(name), arguments.only)
        else:
            until_s = start_s + 60 * arguments.minutes
            run_on_gpu(report, Path(name), arguments.only, until_s)
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
