"""Seconds from starting `weft train` to its first finished step, with 1, 2, 4 and 8 local ranks.

python benchmarks/startup.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

MESHES = {1: "", 2: "dp2", 4: "dp2 tp2", 8: "pp2 dp2 tp2"}
WEFT = str(Path(sys.executable).parent / "weft")
POLL_S = 0.005


class StartupSeconds(NamedTuple):
    """Wall-clock seconds from the start of the process.

    Attributes:
        first_step: until the first step is in events.jsonl.
        exit: until the process has ended, after two steps.
    """

    first_step: float
    exit: float


def measure(mesh: str) -> StartupSeconds:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            WEFT,
            "train",
            "--steps",
            "2",
            "--mesh",
            mesh,
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not has_step(out / "events.jsonl"):
            assert process.poll() is None, f"{command} ended without a step"
            time.sleep(POLL_S)
        first_step = time.perf_counter() - start
        process.wait()
        end = time.perf_counter() - start
    return StartupSeconds(first_step, end)


def has_step(events: Path) -> bool:
    return events.exists() and '"event":"step"' in events.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="starts with each number of ranks")
    args = parser.parse_args()
    for num_ranks, mesh in MESHES.items():
        rounds = [measure(mesh) for _ in range(args.rounds)]
        first_step = statistics.median(seconds.first_step for seconds in rounds)
        end = statistics.median(seconds.exit for seconds in rounds)
        mesh_name = mesh or "one device"
        print(
            f"{num_ranks} ranks ({mesh_name}): first step after {first_step:.2f} s, exit after {end:.2f} s (measured)"
        )


if __name__ == "__main__":
    main()
