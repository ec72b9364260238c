"""OpenTelemetry: a gauge for each series, sent to a collector by OTLP over HTTP. Its address: OTEL_* variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from weft.track.tracker import PROJECT, TrackedRun

EVENTS = "weft.events"


class OtlpMetrics:
    """Gauges `weft.train.loss`, ... and `weft.step`; a counter of texts by their kind.

    The values that a collector gets are the last ones of each interval
    (OTEL_METRIC_EXPORT_INTERVAL, a minute by default), and those of the end.
    """

    def __init__(self, exporter: Any, attributes: Mapping[str, str]) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        # else the exporter prints each attempt; a failure is reported once, by `_check`
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._results: list[Any] = []
        self._export = exporter.export
        exporter.export = self._exported
        reader = PeriodicExportingMetricReader(exporter)
        resource = Resource.create({"service.name": PROJECT})
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter(PROJECT)
        self._attributes = dict(attributes)
        self._gauges: dict[str, Any] = {}
        self._events = self._meter.create_counter(EVENTS)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges.

        Raises:
            ConnectionError: the collector did not take those of an earlier interval.
        """
        self._check()
        for series, value in {"step": step, **values}.items():
            if series not in self._gauges:
                name = f"{PROJECT}.{series.replace('/', '.')}"
                self._gauges[series] = self._meter.create_gauge(name)
            self._gauges[series].set(value, self._attributes)

    def text(self, step: int, kind: str, text: str) -> None:
        """Count the texts of a kind."""
        self._events.add(1, {**self._attributes, "kind": kind})

    def close(self, status: str) -> None:
        """Send the last values.

        Raises:
            ConnectionError: the collector did not take them.
        """
        self._provider.shutdown()
        self._check()

    def _exported(self, *args: Any, **options: Any) -> Any:
        result = self._export(*args, **options)
        self._results.append(result)
        return result

    def _check(self) -> None:
        results, self._results = self._results, []
        if any(result.name != "SUCCESS" for result in results):
            raise ConnectionError("the collector at OTEL_EXPORTER_OTLP_ENDPOINT took no values")


def open_tracker(run: TrackedRun, *, first_step: int) -> OtlpMetrics:
    """Metrics of a run, whose name and layout are attributes of each value."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    layout = str(run.config.get("mesh") or "one rank")
    return OtlpMetrics(OTLPMetricExporter(), {"run": run.name, "layout": layout})
