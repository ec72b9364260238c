"""Trackio: one run there for each run folder, also over resumes; shown by `trackio show --project weft`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from weft.track.tracker import PROJECT, TrackedRun


class TrackioRun:
    """Logs to a run of trackio."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step."""
        self._run.log(dict(values), step=step)

    def text(self, step: int, kind: str, text: str) -> None:
        """A text of a step."""
        self._run.log({f"text/{kind}": text}, step=step)

    def close(self, status: str) -> None:
        """Write what is pending."""
        self._run.finish()


def open_tracker(run: TrackedRun, *, first_step: int) -> TrackioRun:
    """The run with the name of this run folder and the id under which it was first followed."""
    import trackio

    opened = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=f"{run.name}-{run.tracker_id('trackio')[:6]}",
        resume="allow",
        config=dict(run.config),
    )
    return TrackioRun(opened)
