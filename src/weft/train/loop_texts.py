"""The step event of the training loop, and what it says about going on: after a stop, a failure, a step that is not finite."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from weft.checkpoint.folder import checkpoints, resume_command
from weft.checkpoint.saver import newest_path
from weft.train.step import StepReport

MAX_ADVISED_LR = 1e-3
"""Largest learning rate that the advice after a non-finite step names."""


def step_event(number: int, report: StepReport, *, lr: float, elapsed_s: float) -> dict[str, Any]:
    """The `step` event of events.jsonl: loss and norm at full precision; `tokens` counts targets
    over all ranks.
    """
    event = {
        "event": "step",
        "step": number,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": lr,
        "tokens": report.targets,
        "tokens_per_s": report.targets / elapsed_s,
        "loss_scale": report.loss_scale,
        "skipped": report.skipped,
        "step_s": elapsed_s,
        "mem_bytes": max(report.mem_bytes),
        "stage_mem_bytes": list(report.mem_bytes),
    }
    if report.expert_load is not None:
        event["expert_load"] = report.expert_load
    if report.rewards is not None:
        event |= report.rewards.fields()
    if report.outer is not None and (report.outer.sent_bytes or report.outer.is_applied):
        event["outer_step"] = report.outer.is_applied
        event["outer_sent_bytes"] = report.outer.sent_bytes
        event["outer_waited_s"] = report.outer.waited_s
    return event


def restart_note(run_folder: Path) -> str:
    """How to go on after a failure: from the newest checkpoint."""
    newest = newest_path(run_folder)
    start = "from the start (there is no checkpoint)"
    if newest:
        start = f"from {newest}"
    return f"Go on {start}: {resume_command(run_folder)}"


def stop_note(num_done: int, run_folder: Path) -> str:
    """How to go on after a stop request."""
    return f"stopped after step {num_done} and saved. Resume: {resume_command(run_folder)}"


def non_finite_advice(run_folder: Path, num_done: int, *, peak_lr: float) -> str:
    """How to go on after the step that follows `num_done` steps had a non-finite loss or norm.

    A checkpoint of exactly `num_done` steps holds the parameters of the failed step, so the step
    fails again whatever the learning rate: an older checkpoint is named, or a new run.
    """
    found = list(checkpoints(run_folder))
    usable = [path for step, path in found if step < num_done]
    lr = f"--optim.lr {min(peak_lr / 10, MAX_ADVISED_LR):g}"
    config = shlex.quote(f"{run_folder}/run.toml")
    reason = "There is no checkpoint"
    if found:
        step, newest = found[0]
        reason = f"The newest checkpoint is {newest}"
        if step >= num_done:
            reason += ", whose parameters already give this non-finite result"
    if usable:
        source = shlex.quote(str(usable[0]))
        return (
            f"{reason}. Resume from {usable[0]} with a lower --optim.lr: "
            f"weft train {config} --resume {source} {lr}"
        )
    out = shlex.quote(f"{run_folder}-2")
    return f"{reason}. Start again with a lower --optim.lr: weft train {config} --out {out} {lr}"
