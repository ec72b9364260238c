"""The answers and figures of a report: is it right, does it fit, how fast is it; final figures; rows of the config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.dimension import pipeline_axis
from weft.errors import counted, printable
from weft.prove.losses import StepLosses
from weft.report.loss_jumps import LossJump, loss_jumps
from weft.report.recorded_values import RunRecord
from weft.report.run_history import number
from weft.view.progress import loss_unit
from weft.view.quantity import clock, count, memory, percent, short_time

GUARDED = ("nonfinite", "spike", "digest")
"""Kinds of marks after which a run is not taken for right without a look."""
OUT_OF_MEMORY = "out of memory"
"""In the error of a run that found no more."""
FULL_SHARE = 0.9
"""Of the memory, above which the next evaluation or save may not fit."""
MOST_LINES = 3
"""Of findings of one kind."""


@dataclass(frozen=True)
class ReportAnswer:
    """One question with its answer.

    Attributes:
        kind: good, bad or plain.
        lines: further figures.
    """

    question: str
    text: str
    kind: str
    lines: tuple[str, ...]


def answers(run: RunRecord) -> tuple[ReportAnswer, ...]:
    """Is it right, does it fit, how fast is it."""
    return (_proof(run), _memory(run), _speed(run))


def _proof(run: RunRecord) -> ReportAnswer:
    text, kind, lines = _with_losses(run, *_verdict(run))
    found = [mark for mark in run.marks if mark.kind in GUARDED]
    if found:
        text, kind = f"{text}; {counted(len(found), 'finding')} of guards", "bad"
        lines += [mark.text for mark in found[:MOST_LINES]]
    if not number(run.config.get("guard.spike")) > 0:
        jumps = sorted(loss_jumps(run.columns["loss"]), key=lambda jump: -jump.ratio)
        lines += [_jump_text(run, jump) for jump in jumps[:MOST_LINES]]
        if jumps and kind != "bad":
            text, kind = f"{text}; the loss jumps in {counted(len(jumps), 'step')}", "plain"
    return ReportAnswer("Is it right?", text, kind, tuple(map(printable, lines)))


def _jump_text(run: RunRecord, jump: LossJump) -> str:
    return (
        f"step {run.steps[jump.at]}: the loss is {jump.loss:.4g}, {jump.ratio:.3g} times the median"
        f" {jump.median:.4g} of those before; guard.spike names the samples"
    )


def _verdict(run: RunRecord) -> tuple[str, str, list[str]]:
    """What the proofs of the last start say: text, kind, and their lines."""
    verdicts = {str(event.get("verdict")) for event in run.proofs}
    wrong = [event for event in run.proofs if event.get("verdict") == "different"]
    of_steps = [event for event in run.proofs if "step" in event]
    # The line of the first step names the proof at reduced size, too.
    shown = wrong or [*of_steps[:1], *of_steps[1:][-1:]] or run.proofs
    lines = [str(event.get("text") or event.get("reason", "")) for event in shown]
    if wrong:
        return "differs from one device", "bad", lines
    if verdicts == {"equal"}:
        return "equal to one device", "good", lines
    if verdicts:
        return "not all is proved", "plain", lines
    if run.start.get("ranks") == 1:
        return "one rank", "plain", ["There is no other layout to compare it with."]
    return "not proved", "plain", ["This start was not compared with one device."]


def _with_losses(
    run: RunRecord, text: str, kind: str, lines: list[str]
) -> tuple[str, str, list[str]]:
    """A verdict with what the losses beside those of one device say, whatever start they are of."""
    if not run.losses:
        return text, kind, lines
    lines = [*lines, losses_text(run.losses)]
    if not all(each.is_equal for each in run.losses):
        return "differs from one device", "bad", lines
    is_of_start = run.losses[-1].step > number(run.start.get("start_step", 0))
    if not run.proofs and is_of_start:
        return "losses equal to one device", "good", lines[1:]
    return text, kind, lines


def losses_text(losses: Sequence[StepLosses]) -> str:
    """How far the losses of some steps are from those of one device, as one sentence."""
    is_equal = all(each.is_equal for each in losses)
    most = max(losses, key=lambda each: each.relative / (1.0 if is_equal else each.bound))
    steps = f"step {losses[0].step}" if len(losses) == 1 else f"{len(losses)} steps"
    verdict = "equal to" if is_equal else "NOT equal to"
    return (
        f"the losses of {steps} are {verdict} those of one device: {most.relative:.1e} apart in step"
        f" {most.step}, the most, where rounding explains {most.bound:.1e}"
    )


def _memory(run: RunRecord) -> ReportAnswer:
    of_start = run.columns["mem_bytes"][run.last_start]
    finite = of_start[np.isfinite(of_start)]
    most = float(finite.max()) if finite.size else math.nan
    text, kind = _fit(run, most)
    lines = []
    if math.isfinite(most) and math.isfinite(_memory_share(run, most)):
        lines.append(_fullest_text(run, most))
    measured = number(run.prediction.get("measured_bytes"))
    place = run.prediction.get("memory_of")
    predicted = number(
        run.prediction.get("rank_0_peak_bytes" if place == "rank 0" else "peak_bytes")
    )
    if math.isfinite(measured) and math.isfinite(predicted):
        both = f"predicted {memory(predicted)}, measured {memory(measured)}"
        lines.append(f"{both}: tensors on {place}")
    if OUT_OF_MEMORY in _error(run):
        lines.append(_error(run).splitlines()[0])
    return ReportAnswer("Does it fit?", text, kind, tuple(map(printable, lines)))


def _fit(run: RunRecord, most: float) -> tuple[str, str]:
    """Whether the fullest rank fits into the memory: text and kind.

    Args:
        most: bytes; NaN before the first step.
    """
    if OUT_OF_MEMORY in _error(run):
        is_known = f"{OUT_OF_MEMORY}?" not in _error(run)
        return ("no: out of memory" if is_known else "perhaps not: a rank was killed"), "bad"
    if not math.isfinite(most):
        return "no step yet", "plain"
    share = _memory_share(run, most)
    if not math.isfinite(share):
        return f"{memory(most)} on the fullest rank", "plain"
    is_shared = number(run.start.get("memory_ranks")) > 1
    text = f"{'at most ' if is_shared else ''}{percent(share)} of the memory"
    if share <= FULL_SHARE:
        return f"yes: {text}", "good"
    return (text, "plain") if is_shared else (f"barely: {text}", "bad")


def _error(run: RunRecord) -> str:
    return str(run.end.get("error", ""))


def _memory_share(run: RunRecord, most: float) -> float:
    """The share of the memory that its ranks need, if each needs as much as the fullest; NaN where
    the memory is not known.
    """
    num_bytes, ranks = (number(run.start.get(name)) for name in ("memory_bytes", "memory_ranks"))
    return most * ranks / num_bytes if num_bytes > 0 else math.nan


def _fullest_text(run: RunRecord, most: float) -> str:
    num_bytes, ranks = number(run.start.get("memory_bytes")), number(run.start.get("memory_ranks"))
    fullest = f"{memory(most)} on the fullest rank"
    if ranks == 1:
        return f"{fullest}, of {memory(num_bytes)}"
    return f"{fullest}; {count(ranks)} ranks, counted as full, share {memory(num_bytes)}"


def stage_memory(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """Each stage of the last start with its memory, predicted and measured; () where nothing is
    predicted.
    """
    predicted = run.prediction.get("stage_peak_bytes")
    if not isinstance(predicted, list) or not predicted:
        return ()
    names = [f"{pipeline_axis()}{stage}" for stage in range(len(predicted))]
    of_start = run.stage_bytes[run.last_start]
    rows = []
    for stage, (name, num_bytes) in enumerate(zip(names, predicted, strict=True)):
        measured = of_start[:, stage] if stage < of_start.shape[1] else of_start[:, :0]
        finite = measured[np.isfinite(measured)]
        shown = memory(float(finite.max())) if finite.size else "-"
        place = name if len(names) > 1 else "all ranks"
        rows.append((place, memory(number(num_bytes)), shown))
    return tuple(rows)


def measured_memory_text(run: RunRecord) -> str:
    """What the measured memory of a run counts."""
    if str(run.start.get("device", "")).startswith("cpu"):
        return "resident memory of the process, with Python and torch, which no prediction counts"
    return "peak that the device's allocator has given out"


def _speed(run: RunRecord) -> ReportAnswer:
    step_s = run.typical("step_s")
    if not math.isfinite(step_s):
        return ReportAnswer("How fast is it?", "fewer than two steps", "plain", ())
    lines = [f"{short_time(step_s)} a step (median since the last start)", *_predicted(run)]
    if math.isfinite(mfu := run.typical("mfu")):
        lines.append(f"MFU {percent(mfu)}: {mfu_text(run)}")
    slow = [mark.text for mark in run.marks if mark.kind == "straggler"]
    slow = slow[:MOST_LINES]
    problem = run.start.get("mesh_order") or run.prediction.get("mesh_order")
    if problem:
        slow.append(str(problem))
    lines.extend((*slow, str(run.start.get("schedule") or "")))
    text = f"{count(run.typical_speed)} {run.unit}/s"
    shown = tuple(printable(line) for line in lines if line)
    return ReportAnswer("How fast is it?", text, "bad" if slow else "plain", shown)


def mfu_text(run: RunRecord) -> str:
    """What the MFU of a run is: the formula, the FLOPs of a step, the peak of its devices."""
    flops, peak = number(run.start.get("model_flops")), number(run.start.get("peak_tflops"))
    if not (math.isfinite(flops) and math.isfinite(peak)):
        return "model FLOPs of a step over its time and the peak of its devices"
    ranks = counted(int(number(run.start.get("ranks"))), "device")
    return (
        f"{run.start.get('mfu_text')} (bfloat16); model FLOPs of a step {flops:.3g}, "
        f"over its time and the peak of {ranks}"
    )


def _predicted(run: RunRecord) -> Iterator[str]:
    """The prediction beside the steps with which the run has compared it."""
    names = ("step_s", "low_s", "high_s", "measured_s")
    step_s, low_s, high_s, measured_s = (number(run.prediction.get(name)) for name in names)
    if math.isfinite(step_s) and math.isfinite(measured_s):
        place = "inside" if low_s <= measured_s <= high_s else "outside"
        yield (
            f"predicted {short_time(step_s)} ({short_time(low_s)} to {short_time(high_s)}); "
            f"first steps {short_time(measured_s)}, {place} that range"
        )


def final_figures(run: RunRecord) -> Mapping[str, str]:
    """The same names for all runs; "-" where a run has no such figure."""
    losses = run.columns["loss"]
    evaluated = [loss for _, loss in run.evaluations if math.isfinite(loss)]
    speed = run.typical_speed
    tokens = float(run.trained_tokens[-1]) if len(run.steps) else math.nan
    return {
        "state": printable(run.state),
        "layout": printable(str(run.start.get("layout") or "one rank")),
        "steps": count(int(run.steps[-1])) if len(run.steps) else "-",
        "first loss": _loss(losses[0] if len(losses) else math.nan, run.unit),
        "last loss": _loss(losses[-1] if len(losses) else math.nan, run.unit),
        "best evaluation": _loss(min(evaluated, default=math.nan), run.unit),
        "trained on": f"{count(tokens)} {run.unit}" if math.isfinite(tokens) else "-",
        "speed": f"{count(speed)} {run.unit}/s" if math.isfinite(speed) else "-",
        "time of the steps": clock(3600 * float(run.hours[-1])) if len(run.steps) else "-",
        "restarts": str(sum(mark.kind == "restart" for mark in run.marks)),
        "steps trained again": str(run.repeated),
    }


def _loss(value: float, unit: str) -> str:
    return f"{value:.4f}{loss_unit(unit)}" if math.isfinite(value) else "-"


def config_rows(runs: Sequence[RunRecord], keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Each of these keys with its value in every run."""
    for key in keys:
        values = (run.config.get(key) for run in runs)
        yield printable(key), *("" if each is None else printable(str(each)) for each in values)
