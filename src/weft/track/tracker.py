"""What a tracker is, which ones there are, and the run that they follow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from weft.checkpoint.disk import replace_file
from weft.config.schema import TrackerName
from weft.errors import Fault

PROJECT = "weft"
"""The project, or experiment, of runs; the variables of a tracker name another one."""
IDS_FILE = "track.json"


class Tracker(Protocol):
    """Writes the series of one run. It is opened, used and closed by one thread, which is not that
    of the training.
    """

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step (the first is 1), by the names of their series."""
        ...

    def text(self, step: int, kind: str, text: str) -> None:
        """Write a text of a step: of a guard, a restart, a sample."""
        ...

    def close(self, status: str) -> None:
        """Write what is pending.

        Args:
            status: finished, stopped, failed, interrupted; "" where the run goes on: the tracker is
                opened again.
        """
        ...


@dataclass(frozen=True)
class TrackedRun:
    """The run that trackers follow.

    Attributes:
        folder: of the run.
        config: its keys, dotted.
    """

    folder: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.resolve().name

    def tracker_id(self, tracker: str, made: str = "") -> str:
        """The id of this run at a tracker, under which a resumed run goes on with its series.

        Args:
            made: by the tracker; "": a random one is made here, if there is none yet.
        """
        ids = self._ids()
        if tracker not in ids:
            ids[tracker] = made or secrets.token_hex(8)
            replace_file(self.folder / IDS_FILE, json.dumps(ids) + "\n")
        return ids[tracker]

    def known_id(self, tracker: str) -> str | None:
        """The id of this run at a tracker; None: it was not followed there so far."""
        return self._ids().get(tracker)

    def _ids(self) -> dict[str, str]:
        try:
            ids = json.loads((self.folder / IDS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(key): str(value) for key, value in ids.items()} if isinstance(ids, dict) else {}


class TrackerModule(Protocol):
    """The module of a tracker."""

    def open_tracker(self, run: TrackedRun, *, first_step: int) -> Tracker:
        """Open it for a run whose next step is `first_step`; what it holds of later steps was
        trained before a restart, and is replaced.
        """
        ...


@dataclass(frozen=True)
class TrackerEntry:
    """Where a tracker is, and the package that it needs: its name to import, and on the index."""

    module: str
    package: str = ""
    distribution: str = ""


TRACKERS: Mapping[TrackerName, TrackerEntry] = {
    "tensorboard": TrackerEntry("tensorboard_files", "tensorboard", "tensorboard"),
    "wandb": TrackerEntry("wandb_run", "wandb", "wandb"),
    "mlflow": TrackerEntry("mlflow_run", "mlflow", "mlflow"),
    "trackio": TrackerEntry("trackio_run", "trackio", "trackio"),
    "csv": TrackerEntry("csv_table"),
    "prometheus": TrackerEntry("prometheus_text", "prometheus_client", "prometheus"),
    "opentelemetry": TrackerEntry("otlp_metrics", "opentelemetry.exporter.otlp", "opentelemetry"),
}


def tracker_faults(names: Sequence[TrackerName]) -> Iterator[Fault]:
    """The packages of these trackers are installed."""
    for name in names:
        entry = TRACKERS[name]
        if entry.package and not _is_installed(entry.package):
            fix = f"pip install 'weft-train[{entry.distribution}]', or leave {name} out"
            yield Fault("track", f"{name} is not installed", got=name, fix=fix)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def open_tracker(name: TrackerName, run: TrackedRun, *, first_step: int) -> Tracker:
    """Open a tracker; its package is imported here."""
    module = importlib.import_module(f"weft.track.{TRACKERS[name].module}")
    return cast(TrackerModule, module).open_tracker(run, first_step=first_step)
