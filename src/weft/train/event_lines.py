"""Events as lines of JSON: written, read and checked; the history of steps that they record."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.small_files import MIB, capped_lines, open_regular, parse_json

STEP_COUNTING = ("step", "resume", "restart")
"""Events whose `step` is the number of steps done; that of a save, which is asynchronous, may be an
earlier one.
"""
MAX_LINE_BYTES = MIB
"""Length of an event that is read."""
NON_FINITE_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(event: Mapping[str, Any]) -> str:
    """One event as one line of JSON."""
    text = json.dumps(_to_json(event), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file in order, without an incomplete last line.

    Raises:
        ValueError: a line before the last is damaged, or no event.
        UnreadableFile: there is no such file, or it cannot be read.
    """
    with open_regular(path, within=path.parent) as file:
        lines = capped_lines(file, max_bytes=MAX_LINE_BYTES)
        for number in itertools.count(1):
            try:
                line = next(lines, b"")
                if not line.endswith(b"\n"):
                    return
                event = _parse_event(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: damaged line: {error}") from error
            yield event


def _parse_event(line: bytes) -> dict[str, Any]:
    """The event of a line.

    Raises:
        ValueError: it is no JSON object.
    """
    event = _from_json(parse_json(line))
    if not isinstance(event, dict):
        raise ValueError(f"no JSON object: {line[:80]!r}")
    return event


def read_run_events(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_events`; all of them are events of a run, with the numbers that readers count on.

    Raises:
        ValueError: a line is damaged, or no event of a run.
        UnreadableFile: there is no such file, or it cannot be read.
    """
    for event in read_events(path):
        if not _is_run_event(event):
            text = str(event)[:80]
            raise ValueError(f"{path}: no event of a run: {text}")
        yield event


def parse_run_event(line: bytes) -> dict[str, Any]:
    """The event of a run in a line.

    Raises:
        ValueError: the line is damaged, or no event of a run.
    """
    event = _parse_event(line)
    if not _is_run_event(event):
        raise ValueError(f"no event of a run: {str(event)[:80]}")
    return event


def _is_run_event(event: Mapping[str, Any]) -> bool:
    kind = event.get("event")
    step = event.get("step", 0)
    if not isinstance(kind, str) or type(step) is not int or step < 0:
        return False
    if kind != "step":
        return True
    has_loss = type(event.get("loss")) in (int, float)
    has_norm = type(event.get("grad_norm")) in (int, float)
    return has_loss and has_norm


def step_history(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step events of a run without those that a resume went back behind."""
    steps: list[dict[str, Any]] = []
    for event in events:
        kind = event["event"]
        if kind in ("resume", "restart"):
            last_kept = event["step"]
            steps = [step for step in steps if step["step"] <= last_kept]
        elif kind == "step":
            steps.append(event)
    return steps


def _to_json(value: Any) -> Any:
    """`value` with NaN and infinities replaced by their words."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(inner) for inner in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE_WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _from_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_from_json(inner) for inner in value]
    return value
