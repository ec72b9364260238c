"""The sections of the GPU checks: what is installed, whole runs, layouts, process groups, attention, saves, speed, a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from benchmarks.gpu.kernels import check_attention, check_profile
from benchmarks.gpu.layouts import BOUNDS, check_determinism, layout_checks
from benchmarks.gpu.process_groups import check_process_groups
from benchmarks.gpu.product import product_checks
from benchmarks.gpu.report import Check, Row, Settings
from benchmarks.gpu.saves import check_copies, check_stall
from benchmarks.gpu.speed import (
    check_compiled_numbers,
    check_documents,
    check_matrix_peak,
    check_tf32,
    goal_checks,
    speed_checks,
)

from weft.run.devices import find_gpus, fork_problem

COMMAND_LIMIT_S = 170.0
BATCH = "--data.seq_len 16 --batch.global_size 4 --batch.micro_size 1"
TINY = f"--model.layers 2 --model.dim 32 --model.heads 2 --model.kv_heads 2 --model.ffn 64 {BATCH}"


def check_environment(settings: Settings) -> Iterator[Row]:
    """What is installed, and whether asking for GPUs leaves this process able to fork."""
    gpus = find_gpus()
    problem = fork_problem()
    yield Row("asking for GPUs keeps this process able to fork", problem, not problem)
    yield Row("GPUs", f"{gpus.num_visible} visible, {gpus.num_present} present")
    yield Row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    if settings.device != "cpu":
        yield Row("GPU", torch.cuda.get_device_name(settings.device))


def command_checks(settings: Settings) -> list[Check]:
    """`weft train`: a run, its resume, and rank threads that share the device."""
    device = "cpu" if settings.device == "cpu" else "cuda"
    options = f"--device {device} {TINY}".split()
    out = str(settings.folder / "run")
    first = [*options, "--steps", "2", "--save.every", "1", "--out", out]
    checks = [Check("train", partial(_train, "train", first))]
    if settings.is_rehearsal:
        return checks
    resumed = [*options, "--steps", "4", "--resume", "auto", "--out", out]
    checks.append(Check("resume", partial(_train, "resume", resumed)))
    name = "four rank threads on one device"
    threads = [*options, "--mesh", "dp2 tp2", "--transport", "threads", "--steps", "2"]
    threads += ["--out", str(settings.folder / "threads")]
    run = partial(_train, name, threads)
    checks.append(Check(name, run))
    models = {"a model of a user": str(_user_model(settings))}
    if find_spec("transformers") is not None:
        models["a decoder of transformers"] = "hf:olmo2"
    for number, (name, model) in enumerate(models.items()):
        words = [*f"--device {device} {BATCH} --model.name {model} --steps 2".split()]
        words += ["--out", str(settings.folder / f"model{number}")]
        checks.append(Check(name, partial(_train, name, words)))
    return checks


def _user_model(settings: Settings) -> Path:
    """The first model of docs/your-model.md."""
    page = Path(__file__).parents[2] / "docs/your-model.md"
    _, _, code = page.read_text().partition("```python\n")
    path = settings.folder / "gpt.py"
    path.write_text(code.partition("```")[0])
    return path


def _train(name: str, options: Sequence[str], settings: Settings) -> Iterator[Row]:
    command = [sys.executable, "-m", "weft", "train", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        yield Row(name, done.stderr.strip()[-300:], is_ok=False)
        return
    folder = Path(options[options.index("--out") + 1])
    lines = (folder / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    yield Row(name, f"{len(steps)} steps, loss {steps[-1]['loss']:.4f}", is_ok=True)


def _one(name: str, run: Callable[[Settings], Iterator[Row]]) -> Callable[[Settings], list[Check]]:
    def checks(settings: Settings) -> list[Check]:
        return [Check(name, run)]

    return checks


def _speed(settings: Settings) -> list[Check]:
    peak = Check("matrix products", check_matrix_peak)
    return [peak, *goal_checks(settings), *speed_checks(settings)]


def _switches(settings: Settings) -> list[Check]:
    checks = [Check("TF32", check_tf32), Check("documents in long sequences", check_documents)]
    if not settings.is_rehearsal:  # on the CPU it compiles for a minute
        checks.append(Check("compiled blocks", check_compiled_numbers))
    return checks


def _saves(settings: Settings) -> list[Check]:
    return [
        Check("copies beside the computation", check_copies),
        Check("stall of a save", check_stall),
    ]


SECTIONS: dict[str, Callable[[Settings], list[Check]]] = {
    "environment": _one("environment", check_environment),
    "commands": command_checks,
    **{f"layouts in {dtype}": partial(layout_checks, dtype) for dtype in BOUNDS},
    "process groups": _one("process groups", check_process_groups),
    "deterministic mode": _one("deterministic mode", check_determinism),
    "attention": _one("attention", check_attention),
    "saves": _saves,
    "product": product_checks,
    "speed": _speed,
    "switches": _switches,
    "profile": _one("profile", check_profile),
}
"""In this order: the first one asks whether this process may fork, before CUDA starts."""
