"""All checks on one GPU, in less than 25 minutes: `make gpu`. Exit code 0: all as it must be; 1: not; 2: no GPU.

python -m benchmarks.gpu                # on cuda:0
python -m benchmarks.gpu --rehearse     # tiny, on the CPU
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.gpu.kernels import check_attention, check_profile
from benchmarks.gpu.layouts import check_determinism, check_layouts
from benchmarks.gpu.process_groups import check_process_groups
from benchmarks.gpu.report import Report, Row, Settings
from benchmarks.gpu.speed import check_speed

from weft.run.devices import find_gpus, fork_problem

MINUTES = 22
COMMAND_LIMIT_S = 180.0


def check_environment(settings: Settings) -> Iterator[Row]:
    """What is installed, and whether asking for GPUs leaves this process able to fork."""
    gpus = find_gpus()
    problem = fork_problem()
    yield Row("asking for GPUs keeps this process able to fork", problem, not problem)
    yield Row("GPUs", f"{gpus.num_visible} visible, {gpus.num_present} present")
    yield Row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    if settings.device != "cpu":
        yield Row("GPU", torch.cuda.get_device_name(settings.device))


def check_commands(settings: Settings) -> Iterator[Row]:
    """`weft train`: a run, its resume, and rank threads that share the device."""
    device = "cpu" if settings.device == "cpu" else "cuda"
    tiny = "--model.layers 2 --model.dim 32 --model.heads 2 --model.kv_heads 2 --model.ffn 64"
    tiny += " --data.seq_len 16 --batch.global_size 4 --batch.micro_size 1"
    options = f"--device {device} {tiny}".split()
    out = settings.folder / "run"
    yield _train("train", [*options, "--steps", "2", "--save.every", "1", "--out", str(out)], out)
    if settings.is_rehearsal:
        return
    resumed = [*options, "--steps", "4", "--resume", "auto", "--out", str(out)]
    yield _train("resume", resumed, out)
    shared = settings.folder / "threads"
    threads = [*options, "--mesh", "dp2 tp2", "--transport", "threads", "--steps", "2"]
    yield _train("four rank threads on one device", [*threads, "--out", str(shared)], shared)


def _train(name: str, options: list[str], out: Path) -> Row:
    command = [sys.executable, "-m", "weft", "train", *options]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        return Row(name, done.stderr.strip()[-300:], is_ok=False)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    return Row(name, f"{len(steps)} steps, loss {steps[-1]['loss']:.4f}", is_ok=True)


SECTIONS = {
    "environment": check_environment,
    "commands": check_commands,
    "layouts on one device": check_layouts,
    "process groups": check_process_groups,
    "deterministic mode": check_determinism,
    "attention": check_attention,
    "speed": check_speed,
    "profile": check_profile,
}
"""In this order: the first one asks whether this process may fork, before CUDA starts."""


def main() -> int:
    """Run the sections and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny checks on the CPU")
    arguments = parser.parse_args()
    if not arguments.rehearse and find_gpus().num_visible == 0:
        print("no GPU: nothing was checked; --rehearse runs tiny checks on the CPU")
        return 2
    report = Report()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            device="cpu" if arguments.rehearse else "cuda:0",
            is_rehearsal=arguments.rehearse,
            folder=Path(folder),
            deadline_s=start + 60 * MINUTES,
        )
        for title, section in SECTIONS.items():
            report.run(title, section, settings)
    minutes = (time.monotonic() - start) / 60
    kind = "rehearsal on the CPU" if arguments.rehearse else "GPU"
    print(f"\n{kind}: {len(report.rows)} rows, {len(report.failures)} failed, {minutes:.1f} min")
    for row in report.failures:
        print(row)
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
