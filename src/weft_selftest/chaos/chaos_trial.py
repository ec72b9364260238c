"""One layout of `weft chaos`: a training run without faults and one with, each in a process of its own, and their comparison."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft.checkpoint.folder import checkpoints
from weft.errors import EXIT_FAILED, EXIT_OK, WeftError
from weft.run.launch import same_attempt
from weft.run.worker import end_with_parent
from weft.small_files import UnreadableFile
from weft.start.checked_run import load_checked_run
from weft.start.rules.start_checks import data_checks
from weft.start.run_folder import locked_out
from weft.start.train_run import train
from weft.train.event_lines import read_events, step_history
from weft.train.event_log import EVENTS
from weft_selftest.chaos.chaos_layout import ChaosLayout
from weft_selftest.chaos.chaos_report import TrialResult, num_restarts, outcomes_of
from weft_selftest.chaos.fault_injection import FaultInjection, read_ledger
from weft_selftest.chaos.fault_plan import Cell, FaultPlan, num_steps, plan_faults

HANG_S = 60.0
"""Without a new event for this long, a run hangs: far more than any detection takes."""
POLL_S = 0.05
MAX_SPARE_RESTARTS = 5
ERRORS = "errors.txt"

MakeWords = Callable[[Path], Sequence[str]]
"""The run folder -> the command line of a run."""


def run_trial(
    layout: ChaosLayout,
    cells: Sequence[Cell],
    make_words: MakeWords,
    *,
    folder: Path,
    seed: int,
    source: Path | None = None,
) -> TrialResult:
    """Train with the faults of one layout and without, and compare.

    Raises:
        UserError: the layout is not valid.
    """
    start_s = time.monotonic()
    folder.mkdir()
    faults = plan_faults(cells, num_ranks=layout.mesh.size, seed=seed)
    plan = FaultPlan(
        faults=faults,
        ledger=folder / "ledger.jsonl",
        run_folder=folder / "faulty",
        reduced_axes=layout.reduced_axes,
        source=source,
    )
    steps = num_steps(faults)
    restarts = len(faults) + MAX_SPARE_RESTARTS
    common = ["--steps", str(steps), "--run.restarts", str(restarts)]
    clean = folder / "clean"
    load_checked_run([*make_words(clean), *common], data_checks)
    clean_end = _run([*make_words(clean), *common], clean, None)
    if clean_end != "finished":
        text = f"the run without faults has {clean_end}: {_last_line(clean)}"
        raise WeftError(f"{layout.text}: {text}")
    words = [*make_words(plan.run_folder), *common]
    end = _run(words, plan.run_folder, plan)
    events = _events(plan.run_folder)
    ledger = read_ledger(plan.ledger)
    outcomes = outcomes_of(faults, ledger, events, end=end)
    return TrialResult(
        layout=layout.text,
        num_ranks=layout.mesh.size,
        steps=steps,
        outcomes=outcomes,
        end=end,
        is_identical=end == "finished" and record_of(plan.run_folder) == record_of(clean),
        restarts=tuple(event for event in events if event["event"] == "restart"),
        num_unexplained=num_restarts(ledger) - sum(outcome.is_restarted for outcome in outcomes),
        seconds=time.monotonic() - start_s,
        error="" if end == "finished" else _last_line(plan.run_folder),
    )


def _run(words: Sequence[str], out: Path, plan: FaultPlan | None) -> str:
    """Train in a fork of this process: `finished`, `failed` or `hung`."""
    out.mkdir()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_train_in_child, args=(words, out, plan, os.getpid()))
    process.start()
    try:
        hangs = _wait(process, out)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    if hangs:
        return "hung"
    if process.exitcode == EXIT_OK:
        return "finished"
    return "failed"


def _wait(process: BaseProcess, out: Path) -> bool:
    """Wait for a run; whether it has written no event for HANG_S."""
    size = -1
    changed_s = time.monotonic()
    while process.is_alive():
        process.join(POLL_S)
        events = out / EVENTS
        if events.exists():
            new_size = events.stat().st_size
        else:
            new_size = 0
        if new_size != size:
            size = new_size
            changed_s = time.monotonic()
        elif time.monotonic() - changed_s > HANG_S:
            return True
    return False


def _train_in_child(words: Sequence[str], out: Path, plan: FaultPlan | None, parent: int) -> None:
    """Train until the end of the run or of the parent; errors go to a file of the run folder."""
    end_with_parent(parent)
    _redirect(out)
    run = load_checked_run(words).with_values({"save.remote": None})  # faults stay on this machine
    if plan is None:
        adapt = same_attempt
    else:
        adapt = FaultInjection(plan).adapt
    code = EXIT_FAILED
    try:
        with locked_out(run.model, run.out, run.resume, now=datetime.now()):
            code = train(run, adapt_attempt=adapt)
    except WeftError as error:
        sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(code)


def _redirect(out: Path) -> None:
    """Standard output is discarded, errors go to a file of the run folder."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    silent = os.open(os.devnull, os.O_RDWR)
    errors = os.open(out / ERRORS, append, 0o600)
    os.dup2(silent, 1)
    os.dup2(errors, 2)


def _last_line(out: Path) -> str:
    path = out / ERRORS
    if path.exists():
        lines = path.read_text(errors="replace").splitlines()
    else:
        lines = []
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _events(out: Path) -> list[dict[str, Any]]:
    try:
        return list(read_events(out / EVENTS))
    except (UnreadableFile, ValueError):
        return []


def record_of(out: Path) -> tuple[list[Any], dict[str, str]]:
    """Step, loss and gradient norm of every step that counts, and the hashes of the tensor files of
    the last checkpoint.
    """
    steps: list[Any] = []
    for event in step_history(_events(out)):
        numbers = (event["step"], event["loss"], event["grad_norm"], event["lr"])
        steps.append(numbers)
    hashes: dict[str, str] = {}
    for _, newest in checkpoints(out):
        for file in sorted(newest.glob("*.safetensors")):
            content = file.read_bytes()
            hashes[file.name] = hashlib.sha256(content).hexdigest()
        break
    return steps, hashes
