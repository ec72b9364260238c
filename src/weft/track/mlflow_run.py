"""MLflow: one run there for each run folder, also over resumes. Server and experiment: MLFLOW_* variables."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from weft.track.tracker import PROJECT, TrackedRun

MAX_PARAMS = 100
"""Parameters that one request takes."""
MAX_VALUE_CHARS = 500
REQUEST_S = 2.0
"""Time between two requests with numbers: each takes about 10 ms of computing, whatever it holds."""
MOST_METRICS = 500
"""Numbers that wait for a request; one takes 1,000."""
STATUS = {"finished": "FINISHED", "failed": "FAILED"}
"""A run that was stopped or interrupted was KILLED there; it is RUNNING again after a resume."""


class MlflowRun:
    """Logs to a run of MLflow."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._id = run_id
        self._waiting: list[Any] = []
        self._sent_s = -math.inf

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step, in one request with those of the steps of REQUEST_S."""
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        self._waiting += [Metric(name, value, now_ms, step) for name, value in values.items()]
        is_due = time.monotonic() - self._sent_s >= REQUEST_S
        if is_due or len(self._waiting) >= MOST_METRICS:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MOST_METRICS):
            metrics = waiting[start : start + MOST_METRICS]
            self._client.log_batch(self._id, metrics=metrics, synchronous=True)
        self._sent_s = time.monotonic()

    def text(self, step: int, kind: str, text: str) -> None:
        """A file of the run."""
        self._client.log_text(self._id, text, f"{kind}/step-{step:06d}.txt")

    def close(self, status: str) -> None:
        """Send what waits, and say how the run has ended."""
        self._send()
        if status:
            self._client.set_terminated(self._id, STATUS.get(status, "KILLED"))


def open_tracker(run: TrackedRun, *, first_step: int) -> MlflowRun:
    """The run of this run folder; a new one has the keys of the config as its parameters."""
    from mlflow import MlflowClient

    client = MlflowClient()
    known = run.known_id("mlflow")
    if known is not None:
        client.update_run(known, status="RUNNING")
        return MlflowRun(client, known)
    made = client.create_run(_experiment(client), run_name=run.name)
    run_id = run.tracker_id("mlflow", made=made.info.run_id)
    _log_params(client, run_id, run.config)
    return MlflowRun(client, run_id)


def _experiment(client: Any) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _log_params(client: Any, run_id: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    params = [Param(key, str(value)[:MAX_VALUE_CHARS]) for key, value in config.items()]
    for start in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS], synchronous=True)
