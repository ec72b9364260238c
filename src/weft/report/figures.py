"""The answers and figures of a report: is it right, how much memory, how fast is it; final figures; keys that differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import counted, printable
from weft.report.recorded_values import RunRecord, median, number
from weft.view.quantity import clock, count, memory, percent, short_time

GUARDED = ("nonfinite", "spike", "digest", "skipped")
"""Kinds of marks after which a run is not taken for right without a look."""
MOST_FINDINGS = 3
OWN_KEYS = ("out", "resume")
"""Keys that differ between any two runs."""


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
    """Is it right, how much memory, how fast is it."""
    return (_proof(run), _memory(run), _speed(run))


def _proof(run: RunRecord) -> ReportAnswer:
    verdicts = [str(event.get("verdict", "")) for event in run.proofs]
    # The line of the first step names the proof at reduced size, too.
    lines = [printable(str(event.get("text", ""))) for event in run.proofs[-1:]]
    found = [mark for mark in run.marks if mark.kind in GUARDED]
    text, kind = "not proved", "plain"
    if verdicts and all(verdict == "equal" for verdict in verdicts):
        text, kind = "equal to one device", "good"
    elif verdicts:
        text, kind = "not all is proved", "bad"
    if found:
        text, kind = f"{text}; {counted(len(found), 'finding')} of guards", "bad"
        lines += [printable(mark.text) for mark in found[:MOST_FINDINGS]]
    return ReportAnswer("Is it right?", text, kind, tuple(lines))


def _memory(run: RunRecord) -> ReportAnswer:
    measured = number(run.prediction.get("measured_bytes"))
    place = run.prediction.get("memory_of")
    key = "rank_0_peak_bytes" if place == "rank 0" else "peak_bytes"
    predicted = number(run.prediction.get(key))
    largest = run.columns["mem_bytes"]
    finite = largest[np.isfinite(largest)]
    lines: list[str] = []
    if math.isfinite(measured) and math.isfinite(predicted):
        lines.insert(
            0,
            f"predicted {memory(predicted)}, measured {memory(measured)}: tensors on {printable(str(place))}",
        )
    failed = "OutOfMemory" in str(run.end.get("error", "")) or "out of memory" in str(
        run.end.get("error", "")
    )
    if failed:
        return ReportAnswer(
            "How much memory?",
            "out of memory",
            "bad",
            (*lines, printable(str(run.end.get("error")))),
        )
    text = f"{memory(float(finite.max()))} on the fullest rank" if finite.size else "no step yet"
    return ReportAnswer("How much memory?", text, "plain", tuple(lines))


def _speed(run: RunRecord) -> ReportAnswer:
    step_s = median(run.columns["step_s"][1:])
    if not math.isfinite(step_s):
        return ReportAnswer("How fast is it?", "fewer than two steps", "plain", ())
    lines = [f"{short_time(step_s)} a step (median, measured)"]
    low, high = number(run.prediction.get("low_s")), number(run.prediction.get("high_s"))
    mid = number(run.prediction.get("step_s"))
    if math.isfinite(mid):
        place = "inside" if low <= step_s <= high else "OUTSIDE"
        lines.append(
            f"predicted {short_time(mid)} ({short_time(low)} to {short_time(high)}): {place} the range"
        )
    mfu = median(run.columns["mfu"])
    if math.isfinite(mfu):
        lines.append(f"MFU {percent(mfu)}")
    slow = [mark.text for mark in run.marks if mark.kind == "straggler"]
    lines.extend(printable(text) for text in slow[:3])
    bubble = str(run.start.get("schedule") or "")
    if bubble:
        lines.append(printable(bubble))
    text = f"{count(run.typical_speed)} {run.unit}/s"
    return ReportAnswer("How fast is it?", text, "bad" if slow else "plain", tuple(lines))


def final_figures(run: RunRecord) -> Mapping[str, str]:
    """The same names for all runs; "-" where a run has no such figure."""
    losses = run.columns["loss"]
    evaluated = [loss for _, loss in run.evaluations if math.isfinite(loss)]
    tokens = float(run.trained_tokens[-1]) if len(run.steps) else math.nan
    return {
        "state": printable(run.state),
        "layout": printable(str(run.start.get("layout") or "one rank")),
        "steps": count(int(run.steps[-1])) if len(run.steps) else "-",
        "first loss": _loss(losses[0] if len(losses) else math.nan),
        "last loss": _loss(losses[-1] if len(losses) else math.nan),
        "best evaluation": _loss(min(evaluated, default=math.nan)),
        "trained on": f"{count(tokens)} {run.unit}" if math.isfinite(tokens) else "-",
        "speed": f"{count(run.typical_speed)} {run.unit}/s"
        if math.isfinite(run.typical_speed)
        else "-",
        "time of the steps": clock(3600 * float(run.hours[-1])) if len(run.steps) else "-",
        "restarts": str(sum(mark.kind == "restart" for mark in run.marks)),
        "steps trained again": str(run.repeated),
    }


def _loss(value: float) -> str:
    return f"{value:.4f} nats" if math.isfinite(value) else "-"


def config_rows(runs: Sequence[RunRecord]) -> Iterator[tuple[str, ...]]:
    """Every key with the value of each run."""
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = (run.config.get(key) for run in runs)
        yield (
            printable(key),
            *("" if value is None else printable(str(value)) for value in values),
        )


def differing_rows(runs: Sequence[RunRecord]) -> Iterator[tuple[str, ...]]:
    """The keys whose values are not the same in all runs."""
    for key, *values in config_rows(runs):
        if len(set(values)) > 1 and key not in OWN_KEYS:
            yield (key, *values)
