"""First steps of a run beside their prediction, and MFU: events, texts, and one real run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_step_costs import run_of
from weft.cli import main
from weft.config.hardware import Hardware, find_hardware
from weft.config.keys import flatten
from weft.config.load import load
from weft.config.lora import adapter_flops
from weft.config.run import plan_of
from weft.core.model_config import weight_flops
from weft.core.node_placement import NodePlacement
from weft.errors import EXIT_OK
from weft.layout.utilization import ALL_TRAINED, Utilization, model_flops
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.simulate.predict import predict
from weft.planner.simulate.speeds import Speeds
from weft.run.forked_answer import RunningAnswer
from weft.start.answer_here import AnswerHere
from weft.start.comparison import (
    MeasuredAndPredicted,
    comparison_of,
    predicted,
    slow_compute_note,
    start_prediction,
)

SLOW_NETWORK = replace(find_hardware("h100"), network_gb_s=0.05)
UTILIZATION = Utilization(flops=4e12, num_devices=2, peak_tflops=10.0)
ANSWER = {
    "hardware": "a device",
    "source": "24 runs",
    "step_s": 1.0,
    "low_s": 0.9,
    "high_s": 1.1,
    "peak_bytes": 2**30,
    "rank_0_peak_bytes": 2**29,
}


class Answered:
    """A prediction that is there after some polls."""

    def __init__(self, answer: Any, after: int = 0) -> None:
        self.answer = answer
        self.left = after

    def poll(self, patience_s: float = 0.0) -> Any:
        self.left -= 1
        return self.answer if self.left < 0 or patience_s else None


def events_of(
    comparison: MeasuredAndPredicted, count: int, step_s: float = 1.0
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        event = {"event": "step", "step": number, "step_s": step_s, "mem_bytes": 3 * 2**30}
        found.extend(map(dict, comparison.events(event)))
    return found


def comparison(prediction: Any, last_step: int = 100) -> MeasuredAndPredicted:
    return MeasuredAndPredicted(UTILIZATION, prediction, allocator=None, last_step=last_step)


def test_steps_have_mfu_after_the_warm_up() -> None:
    steps = events_of(comparison(None), 4)
    assert ["mfu" in step for step in steps] == [False, False, True, True]
    actual = steps[-1]["mfu"]
    assert actual == pytest.approx(4e12 / 1.0 / 2 / 10e12)


def test_one_event_compares_the_first_steps_with_the_prediction() -> None:
    found = events_of(comparison(Answered(ANSWER, after=2)), 12, step_s=1.05)
    compared = [event for event in found if event["event"] == "prediction"]
    assert len(compared) == 1
    assert compared[0]["step"] == 7  # two to warm up, three timed, two polls in vain
    assert compared[0]["measured_s"] == 1.05
    assert compared[0]["measured_bytes"] == 3 * 2**30
    assert "predicted 1.00 GiB of tensors on fullest rank, measured 3.00 GiB" in compared[0]["text"]
    assert "inside the range" in compared[0]["text"]
    assert "3 forwards of model FLOPs, of 10 TFLOP/s a device" in compared[0]["text"]


def test_a_step_outside_the_range_is_said_to_be() -> None:
    text = events_of(comparison(Answered(ANSWER)), 5, step_s=1.5)[-1]["text"]
    assert "OUTSIDE the range" in text


def test_what_is_wrong_with_the_order_of_axes_is_said_as_soon_as_it_is_predicted() -> None:
    text = "mesh order: a step takes 1.8 times as long"
    bad_order = Answered({**ANSWER, "mesh_order": text}, after=1)
    told = MeasuredAndPredicted(UTILIZATION, bad_order, None, last_step=9, awaits_order=True)
    kinds = [(event["event"], event.get("text")) for event in events_of(told, 3)]
    assert kinds == [("step", None), ("step", None), ("note", text), ("step", None)]
    right = MeasuredAndPredicted(UTILIZATION, Answered(ANSWER), None, 9, awaits_order=True)
    assert {event["event"] for event in events_of(right, 3)} == {"step"}


@pytest.mark.parametrize(
    ("hardware", "start"),
    [
        (SLOW_NETWORK, "mesh order: a step takes"),
        (replace(SLOW_NETWORK, network_gb_s=0.0), "mesh order: tp2 is on 2 nodes, and dp4, which"),
    ],
)
def test_ranks_of_a_launcher_on_several_nodes_have_their_order_predicted(
    hardware: Hardware, start: str
) -> None:
    run = run_of("--mesh tp2,dp4 --batch.global_size 16")
    assert predicted(run, hardware, NodePlacement.even(8, 4))["mesh_order"].startswith(start)
    assert "mesh_order" not in predicted(run, hardware, NodePlacement.even(8, 8))
    assert "mesh_order" not in predicted(run, hardware)


def test_the_last_step_waits_for_the_prediction() -> None:
    found = events_of(comparison(Answered(ANSWER, after=99), last_step=6), 6)
    assert found[-1]["event"] == "prediction"


def test_a_run_that_cannot_be_predicted_says_why() -> None:
    found = events_of(comparison(Answered({"failure": "too large"})), 9)
    assert found[5] == {"event": "note", "text": "no prediction of this run: too large"}
    assert {event["event"] for event in found[6:]} == {"step"}


def test_mfu_of_a_prediction_and_of_a_run_are_one_formula() -> None:
    run = run_of("--mesh dp2")
    device = find_hardware("h100")
    prediction = predict(MeasuredRun.of(run), Speeds(device))
    assert prediction.speeds.efficiency == device.efficiency
    plan = plan_of(run)
    measured = Utilization.of(plan, peak_tflops=device.bf16_tflops)
    assert measured.mfu(prediction.step.total_s) == prediction.mfu
    forward_flops = sum(stage.flops for stage in plan.stages)
    assert model_flops(plan) == 3 * plan.global_size * forward_flops


def test_mfu_with_adapters_counts_two_forwards_of_frozen_weights() -> None:
    sizes = "--data.seq_len 64 --model.layers 8 --model.dim 256"
    run = run_of(f"{sizes} --lora.rank 4")
    prediction = predict(MeasuredRun.of(run), Speeds(find_hardware("h100")))
    adapted = adapter_flops(run.lora, run.model, 64)
    plan = plan_of(run)
    assert prediction.utilization.flops == model_flops(plan, adapted)
    assert prediction.utilization.flops == pytest.approx(prediction.step.flops, rel=0.03)
    assert model_flops(plan_of(run_of(sizes))) > 1.3 * prediction.step.flops
    assert "two of frozen weights" in prediction.utilization.text


@pytest.mark.parametrize("family", ["llama3", "mistral", "deepseek", "gpt2"])
def test_weight_flops_grow_with_the_length_and_the_rest_with_its_square(family: str) -> None:
    model = load(["--model.name", family], FAMILIES).model

    def rest(seq_len: int) -> float:
        forward = sum(block.flops for block in model.block_specs(seq_len))
        return forward - weight_flops(model, seq_len)

    assert weight_flops(model, 128) == 2 * weight_flops(model, 64)
    assert 0 < rest(8) < weight_flops(model, 8)
    assert rest(16) == 4 * rest(8)


def test_the_peak_is_that_of_the_named_hardware_or_of_the_cuda_device() -> None:
    plan = plan_of(run_of("--mesh dp2"))

    def peak(hardware: str | None, cuda_name: str | None) -> float | None:
        found = comparison_of(
            plan,
            hardware,
            adapted=ALL_TRAINED,
            cuda_name=cuda_name,
            prediction=None,
            allocator=None,
            last_step=1,
        ).utilization
        return None if found is None else found.peak_tflops

    assert peak("a100", "NVIDIA H100 80GB HBM3") == 312
    assert peak(None, "NVIDIA H100 80GB HBM3") == 989.4
    assert peak(None, "NVIDIA GB200") == find_hardware("gb200").bf16_tflops
    assert peak(None, "NVIDIA H100 PCIe") is None
    assert peak(None, None) is None


@pytest.mark.parametrize(
    ("options", "factor"),
    [("", 15), ("--precision.matmul tf32", 2), ("--precision.compute bfloat16", None)],
)
def test_a_run_on_a_gpu_in_float32_says_what_bfloat16_would_bring(
    options: str, factor: int | None
) -> None:
    config = flatten(run_of(f"--mesh dp2 {options}").model_dump(mode="json"))
    text = f"computes in float32; --precision.compute bfloat16 has {factor} times the peak"
    expected = text if factor else ""
    assert slow_compute_note(config, "NVIDIA H100 80GB HBM3") == expected
    assert slow_compute_note(config, "Some other device") == ""


def test_the_prediction_is_for_the_precision_of_the_run() -> None:
    started: list[Any] = []

    def start(predict: partial[Any], niceness: int) -> RunningAnswer:
        _, hardware, _ = predict.args
        started.append(hardware)
        return AnswerHere({})

    start_prediction(run_of("--mesh dp2 --hardware h100 --precision.matmul tf32"), start)
    start_prediction(run_of("--mesh dp2 --hardware h100"), start)
    assert [each.tflops("float32") for each in started] == [494.7, 67]


@pytest.mark.parametrize(
    "words",
    [
        "--mesh dp2",
        pytest.param("--mesh dp2 --parallel.zero 3", marks=pytest.mark.slow),
        pytest.param("--mesh tp2 --parallel.sequence True", marks=pytest.mark.slow),
        pytest.param("--mesh pp2", marks=pytest.mark.slow),
    ],
)
def test_on_the_cpu_the_allocator_is_compared_with_the_prediction(
    words: str, tmp_path: Path
) -> None:
    """Not the growth of the process, which is 2 to 4 times as much."""
    sizes = "--model.layers 2 --model.dim 64 --data.seq_len 64 --batch.global_size 8"
    run = f"{sizes} --steps 5 --hardware h100 --transport threads --prove.before never --out"
    assert main(["train", *words.split(), *run.split(), str(tmp_path / "run")]) == EXIT_OK
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    (event,) = (event for event in events if event["event"] == "prediction")
    assert event["memory_of"] == "rank 0"
    assert event["measured_bytes"] == pytest.approx(event["rank_0_peak_bytes"], rel=0.05)
    assert "(peak of torch's allocator in a step)" in event["text"]


def test_nothing_is_predicted_without_hardware() -> None:
    assert start_prediction(run_of("--mesh dp2")) is None


@pytest.mark.slow
def test_a_real_run_prints_prediction_against_measurement(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "--steps", "6", "--mesh", "dp2", "--hardware", "h100", "--out", str(out)]
    command = [sys.executable, "-m", "weft", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "prediction for NVIDIA H100" in done.stdout
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    compared = [event for event in events if event["event"] == "prediction"]
    assert len(compared) == 1
    run = load(words[1:], FAMILIES)
    answer = predicted(run, find_hardware("h100"))
    assert {name: compared[0][name] for name in answer} == answer
    steps = [event for event in events if event["event"] == "step"]
    assert "mfu" in steps[-1]


def test_waits_for_other_sites_are_compared_apart_from_steps() -> None:
    answer = {**ANSWER, "outer_every": 2, "outer_s": 3.0}
    compared = comparison(Answered(answer))
    found: list[dict[str, Any]] = []
    for number in range(1, 8):
        event = {"event": "step", "step": number, "step_s": 1.0, "mem_bytes": 2**30}
        if number % 2 == 0:
            event = {**event, "step_s": 5.0, "outer_waited_s": 4.0}
        found.extend(map(dict, compared.events(event)))
    [prediction] = [event for event in found if event["event"] == "prediction"]
    assert prediction["measured_s"] == 1.0
    assert prediction["measured_outer_s"] == 4.0
    assert "predicted wait 3 s every 2 steps besides, measured 4 s" in prediction["text"]


def test_a_link_of_unknown_speed_is_named() -> None:
    [event] = [
        event
        for event in events_of(
            comparison(Answered({**ANSWER, "outer_every": 2, "outer_s": None})), 8
        )
        if event["event"] == "prediction"
    ]
    assert "is not predicted: the link is not known (site.gbit_s)" in event["text"]
