"""Seconds from `weft train` to the first finished step, with 1, 2, 4 and 8 local ranks.

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

MESHES = {1: "", 2: "dp2", 4: "dp2 tp2", 8: "pp2 dp2 tp2"}
WEFT = str(Path(sys.executable).parent / "weft")


def seconds(mesh: str) -> tuple[float, float]:
    """To the first finished step, and to the end of the whole command with that one step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        start = time.perf_counter()
        command = [WEFT, "train", "--steps", "2", "--mesh", mesh, "--device", "cpu", "--out", str(out)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        events = out / "events.jsonl"
        while not (events.exists() and '"event":"step"' in events.read_text()):
            assert process.poll() is None, f"{command} ended without a step"
            time.sleep(0.005)
        first = time.perf_counter() - start
        process.wait()
        return first, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    for ranks, mesh in MESHES.items():
        taken = [seconds(mesh) for _ in range(rounds)]
        first, whole = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{ranks} ranks ({mesh or 'one'}): first step after {first:.2f} s, two steps and out after {whole:.2f} s")


if __name__ == "__main__":
    main()
