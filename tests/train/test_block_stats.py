"""`log.blocks`: gradient norm and RMS of each block are those of the stored tensors, and equal on every layout."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.test_runs import write_run
from tests.tiny_run import SEQUENCES, write_text
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.config.load import load
from weft.core.axes import Box
from weft.errors import EXIT_OK
from weft.models import FAMILIES
from weft.models.common.batch import token_batch
from weft.report.charts import charts
from weft.report.page import report_page
from weft.report.recorded_values import RunRecord
from weft.report.run_history import RunHistory
from weft.track.series import numbers_of
from weft.train.block_stats import BlockStats
from weft.train.build_training import build_step
from weft.train.event_lines import to_line

Event = dict[str, Any]
RATE = 0.5
TINY = (
    *("--model.layers", "2", "--model.dim", "16", "--model.heads", "2", "--model.kv_heads", "2"),
    *(*SEQUENCES, "--batch.global_size", "4", "--transport", "threads"),
)
FLOAT64 = (
    *("--precision.params", "float64", "--precision.compute", "float64"),
    *("--precision.reduce", "float64"),
)


def trained(folder: Path, *words: str) -> list[Event]:
    """The events of a run of four steps in float64."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = ["--data.source", str(write_text(folder.parent)), "--steps", "4"]
    model = ("--model.ffn", "32") if "qwen3-moe" not in words else ("--model.top_k", "2")
    flags = [*TINY, *model, *FLOAT64, *source, *words, "--out", str(folder)]
    assert main(["train", *flags]) == EXIT_OK
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def stored_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    section = open_checkpoint(folder / "ckpt" / f"step-{step:06d}").section("model")
    return {name: section.read(name, Box.whole(shape)) for name, shape in section.shapes.items()}


def test_the_numbers_are_those_of_the_tensors_before_and_after_a_step_of_plain_sgd(
    tmp_path: Path,
) -> None:
    plain = ("--optim.name", "sgd", "--optim.momentum", "0", "--optim.weight_decay", "0")
    rate = ("--optim.lr", str(RATE), "--optim.warmup", "0", "--optim.decay", "constant")
    words = (
        *plain,
        *rate,
        "--optim.clip",
        "0",
        "--save.every",
        "1",
        "--save.keep",
        "9",
        "--log.blocks",
        "2",
    )
    events = trained(tmp_path / "run", *words)
    measured = of_kind(events, "blocks")
    assert [event["step"] for event in measured] == [2, 4]
    for event in measured:
        before = stored_tensors(tmp_path / "run", event["step"] - 1)
        after = stored_tensors(tmp_path / "run", event["step"])
        blocks = {name.partition(".")[0] for name in before}
        assert set(event["grad_norm"]) == set(event["param_rms"]) == blocks
        for block in blocks:
            names = [name for name in before if name.startswith(f"{block}.")]
            values = torch.cat([before[name].flatten() for name in names])
            updates = torch.cat([(before[name] - after[name]).flatten() for name in names])
            assert event["param_rms"][block] == pytest.approx(values.square().mean().sqrt().item())
            norm = updates.norm().item() / RATE
            assert event["grad_norm"][block] == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_outputs_are_those_that_blocks_hand_on(recompute: str) -> None:
    model = ("--model.ffn", "32", "--parallel.recompute", recompute)
    run = load([*TINY, *model, *FLOAT64], FAMILIES)
    step = build_step(run, Comm(run.device_mesh, 0, ThreadWorld(1).transport(0)))
    stats = BlockStats(step, 1)
    outputs: dict[str, list[torch.Tensor]] = {}
    for name, block in step.model.blocks.items():
        block.register_forward_hook(
            lambda _, args, out, name=name: outputs.setdefault(name, []).append(out.detach())
        )
    tokens = torch.arange(4 * 9).view(4, 9)
    batches = [token_batch(row[:, :-1], row[:, 1:]) for row in tokens.split(1)]
    with stats.watch():
        step(batches, lr=0.0, on_gradients=stats.measure)
    (event,) = stats.take_event(1)
    assert list(event["output_rms"]) == ["embed", "layer0", "layer1"]
    for name, found in event["output_rms"].items():
        rms = torch.cat(outputs[name]).square().mean().sqrt().item()
        assert found == pytest.approx(rms, rel=1e-12)


LAYOUTS = {
    "recomputed": ("--parallel.recompute", "full"),
    "dp2": ("--mesh", "dp2"),
    "tp2": ("--mesh", "tp2"),
    "pp2": ("--mesh", "pp2"),
    "ZeRO 1": ("--mesh", "dp2", "--parallel.zero", "1"),
    "ZeRO 2": ("--mesh", "dp2", "--parallel.zero", "2"),
    "ZeRO 3": ("--mesh", "dp2", "--parallel.zero", "3"),
    "cp2 tp2 with sequence parallelism": ("--mesh", "cp2 tp2", "--parallel.sequence", "True"),
    "pp2 dp2, ZeRO 3": ("--mesh", "pp2 dp2", "--parallel.zero", "3"),
    "tp2, in a fixed order": ("--mesh", "dp2 tp2", "--deterministic", "True"),
}


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Event]]:
    """The events of runs on one device, by their further flags."""
    base = tmp_path_factory.mktemp("one")
    return {name: trained(base / name / "run", *words) for name, words in MODELS.items()}


EVERY_STEP = ("--log.blocks", "1", "--optim.clip", "0.1")
MODELS = {
    "llama3": EVERY_STEP,
    "tied": (*EVERY_STEP, "--model.tied", "True"),
    "experts": (*EVERY_STEP, "--model.name", "qwen3-moe", "--model.experts", "4", "--model.expert_ffn", "16"),
    "adapters": (*EVERY_STEP, "--lora.rank", "2"),
}  # fmt: skip


def assert_close(events: list[Event], expected: list[Event]) -> None:
    actual_blocks, blocks = of_kind(events, "blocks"), of_kind(expected, "blocks")
    assert len(actual_blocks) == len(blocks) == 4
    for actual, one in zip(actual_blocks, blocks, strict=True):
        assert actual["step"] == one["step"]
        for field in ("grad_norm", "param_rms", "output_rms"):
            assert list(actual[field]) == list(one[field])
            assert actual[field] == pytest.approx(one[field], rel=1e-10)
        assert actual.get("expert_load") == one.get("expert_load")  # of whole numbers of tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_measures_what_one_device_measures(
    name: str, tmp_path: Path, on_one_device: dict[str, list[Event]]
) -> None:
    events = trained(tmp_path / "run", *MODELS["llama3"], *LAYOUTS[name])
    assert_close(events, on_one_device["llama3"])


@pytest.mark.parametrize(
    ("model", "mesh"),
    [("tied", "pp2"), ("tied", "tp2"), ("experts", "ep2"), ("experts", "pp2 ep2"), ("adapters", "pp2")],
)  # fmt: skip
def test_tied_parameters_experts_and_adapters_count_once(
    model: str, mesh: str, tmp_path: Path, on_one_device: dict[str, list[Event]]
) -> None:
    events = trained(tmp_path / "run", *MODELS[model], "--mesh", mesh)
    assert_close(events, on_one_device[model])


@pytest.mark.parametrize("model", MODELS)
def test_the_norms_of_the_blocks_make_the_norm_of_the_step(
    model: str, on_one_device: dict[str, list[Event]]
) -> None:
    events = on_one_device[model]
    for step, blocks in zip(of_kind(events, "step"), of_kind(events, "blocks"), strict=True):
        total = math.hypot(*blocks["grad_norm"].values())
        assert total == pytest.approx(step["grad_norm"], rel=1e-12)
        loads = blocks.get("expert_load", {})
        assert list(loads) == (["layer0", "layer1"] if model == "experts" else [])
        assert max(loads.values(), default=0.0) == step.get("expert_load", 0.0)


def test_norms_are_without_the_loss_scale(tmp_path: Path) -> None:
    half = ("--precision.compute", "float16", "--precision.reduce", "float32")
    words = ("--log.blocks", "1", *half, "--precision.params", "float32")
    events = trained(tmp_path / "run", *words)
    taken = {event["step"]: event for event in of_kind(events, "step") if not event.get("skipped")}
    assert taken
    assert {event["loss_scale"] for event in taken.values()} != {1}
    for event in of_kind(events, "blocks"):
        if event["step"] in taken:
            norm = math.hypot(*event["grad_norm"].values())
            assert norm == pytest.approx(taken[event["step"]]["grad_norm"], rel=1e-6)


def test_training_is_the_same_with_and_without_and_off_it_records_nothing(tmp_path: Path) -> None:
    numbers = []
    for name, words in (("on", ("--log.blocks", "1")), ("off", ())):
        events = trained(tmp_path / name / "run", *words, "--mesh", "dp2")
        steps = of_kind(events, "step")
        numbers.append([(each["loss"], each["grad_norm"]) for each in steps])
        assert bool(of_kind(events, "blocks")) == bool(words)
    assert numbers[0] == numbers[1]


def test_the_page_has_a_curve_for_each_block_and_trackers_get_the_numbers(tmp_path: Path) -> None:
    events = trained(tmp_path / "run", "--log.blocks", "2", "--track", "csv")
    page = report_page([RunRecord.read(tmp_path / "run")])
    for title in (
        "Gradient norm of a block",
        "RMS of the parameters of a block",
        "RMS of the outputs of a block",
    ):
        assert title in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    (chart,) = [chart for chart in data["charts"] if chart["key"] == "block_grad_norm"]
    assert [series["label"] for series in chart["series"]] == ["embed", "layer0", "layer1", "head"]
    first, second = of_kind(events, "blocks")
    assert chart["series"][1]["x"] == [2, 4]
    norms = [event["grad_norm"]["layer0"] for event in (first, second)]
    assert chart["series"][1]["y"] == pytest.approx(norms, rel=1e-6)
    numbers = numbers_of(first)
    assert numbers["blocks/grad_norm/layer0"] == first["grad_norm"]["layer0"]
    assert numbers["blocks/param_rms/head"] == first["param_rms"]["head"]
    assert numbers["blocks/output_rms/layer1"] == first["output_rms"]["layer1"]
    assert len(numbers) == 4 + 4 + 3
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2", "3", "4"]
    assert all(any(value for key, value in row.items() if key != "step") for row in rows)


def test_the_curves_of_many_blocks_share_the_points_of_a_page(tmp_path: Path) -> None:
    names = [f"layer{index}" for index in range(300)]
    rows = [dict.fromkeys(names, 1.0 + step % 7) for step in range(120)]
    folder = write_run(tmp_path / "run", [1.0] * len(rows))
    with (folder / "events.jsonl").open("a") as file:
        for step, row in enumerate(rows, start=1):
            event = {"event": "blocks", "step": step, "grad_norm": row, "param_rms": row}
            file.write(to_line(event))
    record = RunRecord.read(folder)
    of_blocks = [chart for chart in charts([record]) if chart.key.startswith("block_")]
    assert [len(chart.series) for chart in of_blocks] == [300, 300]
    lengths = [len(each.curve.x) for chart in of_blocks for each in chart.series]
    assert max(lengths) <= 50
    assert not [chart for chart in charts([record, record]) if chart.key.startswith("block_")]


def test_a_history_keeps_a_thousand_measurements_and_none_of_steps_that_are_trained_again() -> None:
    history = RunHistory()
    for step in range(1, 1002):
        history.add({"event": "blocks", "step": step, "grad_norm": {"embed": float(step)}})
    assert list(history.blocks) == list(range(1, 1002, 2))
    history.add({"event": "restart", "step": 500})
    assert max(history.blocks) == 499
