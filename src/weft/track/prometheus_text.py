"""Prometheus: RUN/metrics.prom, the last values, for the textfile collector of node_exporter; no port is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.track.tracker import TrackedRun

FILE = "metrics.prom"
LABELS = ("run", "layout")


class PrometheusText:
    """One gauge a series, `weft_train_loss`, and `weft_step`; the file is replaced at once."""

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        from prometheus_client import CollectorRegistry

        self._path = path
        self._labels = dict(labels)
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges."""
        from prometheus_client import write_to_textfile

        for name, value in {"step": step, **values}.items():
            self._gauge(name).labels(**self._labels).set(value)
        write_to_textfile(str(self._path), self._registry)

    def text(self, step: int, kind: str, text: str) -> None:
        """Count the texts of a kind: weft_guard_events."""
        self._gauge(f"{kind}_events").labels(**self._labels).inc()

    def close(self, status: str) -> None:
        """The last values stay."""

    def _gauge(self, series: str) -> Any:
        from prometheus_client import Gauge

        name = "weft_" + re.sub(r"\W", "_", series)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, series, LABELS, registry=self._registry)
        return self._gauges[name]


def open_tracker(run: TrackedRun, *, first_step: int) -> PrometheusText:
    """The file of a run; it is replaced by the first values."""
    layout = str(run.config.get("mesh") or "one rank")
    return PrometheusText(run.folder / FILE, {"run": run.name, "layout": layout})
