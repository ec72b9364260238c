"""Trackers: series of events, a sink that fails or waits without harm, each tracker's own reader, resumed runs."""

from __future__ import annotations

import csv
import gzip
import math
import queue
import struct
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.tiny_run import TINY
from weft.cli import main
from weft.track import sink as sink_module
from weft.track.csv_table import FILE as CSV_FILE
from weft.track.prometheus_text import FILE as PROMETHEUS_FILE
from weft.track.series import numbers_of, text_of
from weft.track.sink import TrackerSink
from weft.track.tracker import TRACKERS, TrackedRun, open_tracker, tracker_faults
from weft.train.event_log import read_events

Event = dict[str, Any]


def step(number: int, loss: float, **fields: object) -> Event:
    return {"event": "step", "step": number, "loss": loss, "grad_norm": 1.0, "lr": 0.1, **fields}


@pytest.mark.parametrize(
    ("event", "numbers", "text"),
    [
        (
            step(1, 2.0, stage_mem_bytes=[5, 7], mfu=None),
            {"train/loss": 2.0, "train/grad_norm": 1.0, "train/lr": 0.1}
            | {"memory/stage0_bytes": 5.0, "memory/stage1_bytes": 7.0},
            "",
        ),
        ({"event": "eval", "step": 1, "loss": 3.0}, {"eval/loss": 3.0}, ""),
        ({"event": "guard", "step": 1, "text": "spike", "loss": 9.0}, {}, "spike"),
        ({"event": "restart", "step": 1, "reason": "killed"}, {}, "killed"),
        ({"event": "run", "text": "not shown"}, {}, ""),
    ],
)
def test_an_event_is_numbers_or_a_text(event: Event, numbers: object, text: str) -> None:
    assert numbers_of(event) == numbers
    assert text_of(event) == text


class Recorder:
    """A tracker that keeps what it gets, and fails or waits at a step."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self.got: list[tuple[int, float]] = []
        self.closed: list[str] = []
        self.fails_at = math.inf
        self.waits_at = math.inf
        self.is_waiting = threading.Event()
        self.go_on = threading.Event()

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route to the server.")
        if step == self.waits_at:
            self.is_waiting.set()
            self.go_on.wait(60)
        self.got.append((step, values["train/loss"]))

    def text(self, step: int, kind: str, text: str) -> None:
        """Not kept."""

    def close(self, status: str) -> None:
        self.closed.append(status)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[Recorder]:
    """The trackers that sinks open, in order."""
    found: queue.Queue[Recorder] = queue.Queue()

    def open_recorder(name: str, run: TrackedRun, *, first_step: int) -> Recorder:
        recorder = Recorder(first_step)
        recorder.fails_at = 3
        recorder.waits_at = 5
        found.put(recorder)
        return recorder

    monkeypatch.setattr(sink_module, "open_tracker", open_recorder)
    return found


def test_a_tracker_that_fails_gets_no_more_and_training_goes_on(
    opened: queue.Queue[Recorder], tmp_path: Path
) -> None:
    warnings: list[str] = []
    sink = TrackerSink("csv", TrackedRun(tmp_path, {}), warn=warnings.append)
    for number in range(1, 6):
        sink.handle(step(number, 1.0))
    sink.close()
    assert opened.get().got == [(1, 1.0), (2, 1.0)]
    assert warnings == [
        "warning: track: csv gets no more of this run: ConnectionError: no route to the server. Training goes on"
    ]


def test_a_tracker_that_waits_holds_up_neither_steps_nor_the_end(
    opened: queue.Queue[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "CLOSE_S", 0.05)
    monkeypatch.setattr(sink_module, "MAX_PENDING", 4)
    warnings: list[str] = []
    sink = TrackerSink("csv", TrackedRun(tmp_path, {}), warn=warnings.append)
    sink.handle(step(5, 1.0))
    recorder = opened.get(timeout=60)
    assert recorder.is_waiting.wait(60)
    for number in range(6, 20):
        sink.handle(step(number, 1.0))
    sink.close()
    recorder.go_on.set()
    assert warnings == [
        "warning: track: csv gets no more of this run: it is 4 events behind. Training goes on"
    ]
    sink = TrackerSink("csv", TrackedRun(tmp_path, {}), warn=warnings.append)
    sink.handle(step(5, 1.0))
    sink.close()
    opened.get(timeout=60).go_on.set()
    assert "it had not written everything 0.05 s after the end" in warnings[-1]


def test_steps_that_are_trained_again_open_the_tracker_again(
    opened: queue.Queue[Recorder], tmp_path: Path
) -> None:
    sink = TrackerSink("csv", TrackedRun(tmp_path, {}))
    for event in (step(1, 1.0), step(2, 2.0), {"event": "resume", "step": 1}, step(2, 2.5)):
        sink.handle(event)
    sink.handle({"event": "end", "status": "finished", "steps": 2})
    sink.close()
    first, second = opened.get(), opened.get()
    assert (first.first_step, first.got, first.closed) == (1, [(1, 1.0), (2, 2.0)], [""])
    assert (second.first_step, second.got, second.closed) == (2, [(2, 2.5)], ["finished"])


def losses_in(name: str, folder: Path) -> list[tuple[int, float]]:
    """Step -> loss, as the tracker's own reader finds them."""
    return list(READERS[name](folder))


def in_csv(folder: Path) -> Iterator[tuple[int, float]]:
    with (folder / CSV_FILE).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["train/loss"]:
                yield int(row["step"]), float(row["train/loss"])


def in_tensorboard(folder: Path) -> Iterator[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for scalar in events.Scalars("train/loss"):
        yield scalar.step, scalar.value


def in_mlflow(folder: Path) -> Iterator[tuple[int, float]]:
    client = pytest.importorskip("mlflow").MlflowClient()
    run_id = TrackedRun(folder, {}).known_id("mlflow")
    for metric in client.get_metric_history(run_id, "train/loss"):
        yield metric.step, metric.value


def in_trackio(folder: Path) -> Iterator[tuple[int, float]]:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    (run,) = storage.get_runs("weft")
    for row in storage.get_logs("weft", run):
        if "train/loss" in row:
            yield row["step"], row["train/loss"]


def in_wandb(folder: Path) -> Iterator[tuple[int, float]]:
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for content in records_of(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(content)
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            if "train/loss" in row:
                yield int(row["step"]), float(row["train/loss"])


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, W&B's format: blocks of 32 KiB, each record in 1 or more parts."""
    at = 7  # of W&B's header
    parts = b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


READERS = {
    "csv": in_csv,
    "tensorboard": in_tensorboard,
    "mlflow": in_mlflow,
    "trackio": in_trackio,
    "wandb": in_wandb,
}


@pytest.mark.filterwarnings("default")  # of the packages
@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_goes_on_in_its_series(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    if TRACKERS[name].package:
        pytest.importorskip(TRACKERS[name].package)
    out = tmp_path / "run"
    words = ["train", *TINY, "--track", name, "--out", str(out), "--save.keep", "9"]
    assert main([*words, "--steps", "3", "--save.every", "2"]) == 0
    checkpoint = str(out / "ckpt" / "step-000002")
    assert main([*words, "--steps", "4", "--resume", checkpoint]) == 0
    trained = {
        event["step"]: event["loss"]
        for event in read_events(out / "events.jsonl")
        if event["event"] == "step"
    }
    found = losses_in(name, out)
    assert dict(found) == {number: pytest.approx(loss) for number, loss in trained.items()}
    if name in ("csv", "tensorboard"):  # the others keep both values of step 3
        assert [number for number, _ in found] == [1, 2, 3, 4]


def test_prometheus_reads_the_last_values(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    run = TrackedRun(tmp_path / 'a "run"', {"mesh": "dp2"})
    run.folder.mkdir()
    tracker = open_tracker("prometheus", run, first_step=1)
    tracker.numbers(1, {"train/loss": 3.0})
    tracker.text(2, "guard", "a spike")
    tracker.numbers(2, {"train/loss": 2.5})
    tracker.close("finished")
    families = parser.text_string_to_metric_families((run.folder / PROMETHEUS_FILE).read_text())
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert {name: sample.value for name, sample in samples.items()} == {
        "weft_step": 2.0,
        "weft_train_loss": 2.5,
        "weft_guard_events": 1.0,
    }
    assert samples["weft_step"].labels == {"run": 'a "run"', "layout": "dp2"}


class Collector(BaseHTTPRequestHandler):
    """Takes metrics by OTLP, as a collector does; refuses them where it is spoiled."""

    code = 200
    received: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        is_packed = self.headers.get("content-encoding") == "gzip"
        assert self.path == "/v1/metrics"
        self.received.append(gzip.decompress(body) if is_packed else body)
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    pytest.importorskip("opentelemetry.exporter.otlp")
    monkeypatch.setattr(Collector, "received", [])
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Collector
        server.shutdown()
        thread.join()


def test_a_collector_gets_the_last_values(tmp_path: Path, collector: type[Collector]) -> None:
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

    run = TrackedRun(tmp_path / "a run", {"mesh": "dp2"})
    tracker = open_tracker("opentelemetry", run, first_step=1)
    tracker.numbers(1, {"train/loss": 3.0})
    tracker.text(2, "guard", "a spike")
    tracker.numbers(2, {"train/loss": 2.5})
    tracker.close("finished")
    message = metrics_service_pb2.ExportMetricsServiceRequest.FromString(collector.received[-1])
    (resource,) = message.resource_metrics
    values = {}
    for metric in resource.scope_metrics[0].metrics:
        kind = metric.WhichOneof("data")
        (point,) = getattr(metric, kind).data_points
        labels = {label.key: label.value.string_value for label in point.attributes}
        assert labels.pop("run") == "a run"
        assert labels.pop("layout") == "dp2"
        assert labels == ({"kind": "guard"} if kind == "sum" else {})
        values[metric.name] = getattr(point, point.WhichOneof("value"))
    assert values == {"weft.step": 2, "weft.train.loss": 2.5, "weft.events": 1}


def test_a_collector_that_refuses_is_one_warning(
    tmp_path: Path, collector: type[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "code", 400)
    warnings: list[str] = []
    sink = TrackerSink("opentelemetry", TrackedRun(tmp_path, {}), warn=warnings.append)
    sink.handle(step(1, 2.0))
    sink.close()
    assert warnings == [
        "warning: track: opentelemetry gets no more of this run: ConnectionError: the collector at "
        "OTEL_EXPORTER_OTLP_ENDPOINT took no values. Training goes on"
    ]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    faults = [str(fault) for fault in tracker_faults(("csv", "wandb"))]
    assert faults == [
        "track: wandb is not installed (got wandb). Fix: pip install 'weft-train[wandb]', or leave wandb out"
    ]
