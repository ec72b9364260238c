"""The recorded steps of a run folder, read and checked for a comparison. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import DataError, Fault
from weft.small_files import UnreadableFile, open_regular
from weft.train.event_lines import read_run_events, step_history
from weft.train.event_log import EVENTS

KEY = "weft prove"
RUN_FILE = "run.toml"
FIRST_RUN_FILE = "run-1.toml"
"""run.toml of the first start, if a later start had another one."""


def first_config_path(out: Path) -> Path:
    """The config file of the first steps of the run in this folder, also if later steps had another
    one.

    Raises:
        DataError: the folder holds no run.
    """
    for name in (RUN_FILE, EVENTS):
        _check_file(out, name)
    first = out / FIRST_RUN_FILE
    if not first.exists():
        return out / RUN_FILE
    _check_file(out, FIRST_RUN_FILE)
    return first


def _check_file(out: Path, name: str) -> None:
    try:
        open_regular(out / name, within=out).close()
    except UnreadableFile as error:
        if not error.is_missing:
            raise DataError(error.fault(KEY)) from None
        got = f"{str(out)!r} without {name}"
        raise DataError(
            Fault(KEY, "no run in this folder", got=got, fix="name a run folder")
        ) from None


def recorded_steps(out: Path) -> list[dict[str, Any]]:
    """The step events up to the first resume: later steps may have another learning rate.

    Raises:
        DataError: the events are damaged, there is no step among them, or the run started from a
            checkpoint of another folder.
    """
    try:
        events = list(read_run_events(out / EVENTS))
    except UnreadableFile as error:
        raise DataError(error.fault(KEY)) from None
    except ValueError as error:
        raise DataError(Fault(KEY, str(error), fix="name a run whose events are whole")) from None
    steps = step_history(events)
    if not steps:
        raise DataError(Fault(KEY, f"{out}: no step has been recorded", fix="train it first"))
    first = steps[0]["step"]
    if first > 1:
        what = (
            f"the run in {out} starts after step {first - 1}, from a checkpoint of another folder"
        )
        raise DataError(Fault(KEY, what, fix="prove the run of that checkpoint"))
    last = _last_step_before_resume(events)
    if last is None:
        return steps
    return [step for step in steps if step["step"] <= last]


def _last_step_before_resume(events: Iterable[Mapping[str, Any]]) -> int | None:
    """The first step at which a run was resumed; None: it was not."""
    resumed_at: list[int] = [
        event["step"] for event in events if event["event"] == "resume" and event["step"]
    ]
    return min(resumed_at, default=None)
