"""What users run: `weft train` on the device, its speed and memory by its events and by the prediction of `weft explain`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.report import Check, Row, Settings
from benchmarks.gpu.speed import REHEARSED, WORKLOADS, Workload, flags

NUM_STEPS, NUM_WARM_STEPS = 24, 8
COMMAND_LIMIT_S = 150.0
MEMORY_BOUND = 0.05
"""Largest part of the memory of a step by which the prediction may be off."""


def product_checks(settings: Settings) -> list[Check]:
    """A run of each model, as written and compiled."""
    checks = []
    for workload in REHEARSED if settings.is_rehearsal else WORKLOADS:
        for mode in ("off",) if settings.is_rehearsal else ("off", "blocks"):
            name = f"weft train {workload.preset}, compile {mode}"
            checks.append(Check(name, partial(_check_run, name, workload, mode)))
    return checks


def _check_run(name: str, workload: Workload, mode: str, settings: Settings) -> Iterator[Row]:
    is_gpu = settings.device != "cpu"
    options = [*flags(workload), "--compile", mode]
    num_steps = NUM_STEPS if is_gpu else 3
    device = ["--device", "cuda" if is_gpu else "cpu"]
    folder = settings.folder / f"{workload.preset}-{mode}"
    run = ["--steps", str(num_steps), "--out", str(folder), "--save.at_end", "False"]
    _weft("train", [*options, *device, *run])
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "step"]
    timed = steps[NUM_WARM_STEPS:] if is_gpu else steps
    seconds = statistics.median(step["step_s"] for step in timed)
    rate = workload.num_sequences * workload.seq_len / seconds
    gib = max(step["mem_bytes"] for step in steps) / 2**30
    yield Row(name, f"{1e3 * seconds:9.1f} ms {rate:10.0f} tokens/s {gib:5.1f} GiB", is_ok=True)
    if not is_gpu:
        return
    predicted = _explained([*options, "--hardware", _device_name(settings.device)])
    peak = max(role["peak_bytes"] for role in predicted["roles"]) / 2**30
    off = gib / peak - 1
    value = f"{gib:.2f} GiB, predicted {peak:.2f}: {100 * off:+.1f}%"
    yield Row(f"{name}: memory", value, abs(off) <= MEMORY_BOUND)
    time = predicted["time"]
    low, high = time["low_s"], time["high_s"]
    expected = f"{1e3 * time['step_s']:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"
    text = f"{1e3 * seconds:.1f} ms, predicted {expected}"
    yield Row(f"{name}: time of a step", text, low <= seconds <= high)


def _device_name(device: str) -> str:
    from weft.config.hardware import CUDA_NAMES

    full_name = torch.cuda.get_device_name(device)
    for part, name in CUDA_NAMES.items():
        if part in full_name:
            return name
    return "h100"


def _explained(options: Sequence[str]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_weft("explain", [*options, "--json"]))
    return found


def _weft(command: str, options: Sequence[str]) -> str:
    words = [sys.executable, "-m", "weft", command, *options]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"weft {command}: {done.stderr.strip()[-600:]}")
    return done.stdout
