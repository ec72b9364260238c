"""A small training run for clusters: its flags, its losses on one host, and waiting for its steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.hosts import Hosts
from tests.tiny_run import TINY

STEPS = 200
FLAGS = (
    *TINY,
    *("--transport", "process", "--device", "cpu"),
    *("--batch.global_size", "12", "--steps", str(STEPS), "--save.every", "20"),
)
FLOAT64 = (
    *("--precision.params", "float64", "--precision.compute", "float64"),
    *("--precision.reduce", "float64"),
)
WAIT_S = 180.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def cluster_marks(reason: str = "") -> list[pytest.MarkDecorator]:
    """Marks of tests on a cluster.

    Args:
        reason: why there can be no cluster here; "" if there can.
    """
    return [
        pytest.mark.slow,
        pytest.mark.cluster,
        pytest.mark.skipif(bool(reason), reason=reason),
        pytest.mark.timeout(900),
    ]


def losses_on_one_host(folder: Path, mesh: str, flags: Sequence[str] = FLAGS) -> dict[int, float]:
    """Step -> loss of the run without faults, with local ranks."""
    out = folder / "one-host"
    words = [sys.executable, "-m", "weft", "train", *flags, "--mesh", mesh, "--out", str(out)]
    subprocess.run(words, env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True)
    return losses(out)


def events(out: Path) -> list[dict[str, Any]]:
    """The events of a run so far."""
    path = out / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def losses(out: Path) -> dict[int, float]:
    """Step -> loss; of a repeated step the last."""
    steps = [event for event in events(out) if event["event"] == "step"]
    return {event["step"]: event["loss"] for event in steps}


def repeated_losses_differ(out: Path) -> list[int]:
    """Steps that were repeated after a fault with another loss than before."""
    first: dict[int, float] = {}
    found = []
    for event in events(out):
        if event["event"] != "step":
            continue
        loss = first.setdefault(event["step"], event["loss"])
        if loss != event["loss"]:
            found.append(event["step"])
    return found


def last_step(out: Path) -> int:
    """The last step of the newest event."""
    steps = [event["step"] for event in events(out) if event["event"] == "step"]
    return steps[-1] if steps else 0


def resumed_from(out: Path) -> list[int]:
    """Steps of the checkpoints from which the run resumed, in order."""
    found = [event["step"] for event in events(out) if event["event"] == "resume"]
    return [step for step in found if step > 0]  # 0: there was no checkpoint yet


def wait_until(is_true: Callable[[], bool], what: str, logs: Mapping[str, Path]) -> float:
    """Wait; returns the seconds. Fails with the ends of the logs."""
    start_s = time.monotonic()
    while not is_true():
        if time.monotonic() - start_s > WAIT_S:
            texts = []
            for name, path in logs.items():
                text = path.read_text(errors="replace") if path.exists() else "(missing)"
                texts.append(f"--- {name}\n{text[-4000:]}")
            raise AssertionError(f"not after {WAIT_S:.0f} s: {what}\n" + "\n".join(texts))
        time.sleep(0.1)
    return time.monotonic() - start_s


def run_on_each(hosts: Hosts, folder: Path, command: Sequence[str], *, timeout_s: float) -> None:
    """Run a command on every host at the same time; each must end with exit code 0 in time."""
    logs = [folder / f"{name}.log" for name in hosts.names]
    agents = []
    for index, log in enumerate(logs):
        agents.append(hosts.start(index, command, env=ENVIRONMENT, log=log))
    try:
        codes = [agent.wait(timeout_s) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    text = "\n".join(log.read_text(errors="replace") for log in logs)
    assert codes == [0] * hosts.size, text[-6000:]
