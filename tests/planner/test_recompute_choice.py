"""`parallel.recompute = "auto"`: the least recomputation that fits the memory, by rank; its record, and a resume."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.test_memory_before import has_machine
from weft.cli import main
from weft.config import toml
from weft.config.hardware import find_hardware
from weft.config.load import load
from weft.config.run import Run
from weft.errors import EXIT_OK, ConfigError
from weft.layout.recomputation import AUTO, read_policy
from weft.models import FAMILIES
from weft.planner import recompute_choice
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.roles import measure
from weft.planner.recompute_choice import (
    HOST_SHARE,
    HostMemory,
    RecomputeChoice,
    choose_recompute,
    least_level,
)
from weft.start import auto_recompute, memory_before
from weft.train.event_lines import read_run_events

SIZES = [
    "--model.dim",
    "64",
    "--model.ffn",
    "256",
    "--model.heads",
    "4",
    "--data.seq_len",
    "128",
    "--batch.micro_size",
    "2",
]
LAYOUTS = {
    "pp2": "--model.layers 8 --mesh pp2 --batch.global_size 16",
    "zero 3": "--model.layers 6 --mesh dp2 --parallel.zero 3 --batch.global_size 8",
    "tp cp": "--model.layers 4 --mesh cp2,tp2 --parallel.sequence True --batch.global_size 4",
    "interleaved": "--model.layers 8 --mesh pp2 --pipeline.schedule interleaved --batch.global_size 8",
    "zero bubble": "--model.layers 6 --mesh pp2 --pipeline.schedule zero_bubble --batch.global_size 16",
}  # fmt: skip
MIB = 2**20


def run_of(words: str) -> Run:
    return load([*SIZES, *words.split()], FAMILIES)


def peaks_of(run: Run, recompute: str) -> list[int]:
    changed = run.with_values({"parallel.recompute": recompute})
    return [role.memory.peak for role in measure(MeasuredRun.of(changed))]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=40), st.floats(0, 60))
def test_the_level_fits_and_one_less_does_not(peaks: list[int], limit: float) -> None:
    peaks.sort(reverse=True)
    last = len(peaks) - 1
    level = least_level(last, peaks.__getitem__, limit)
    if peaks[last] > limit:
        assert level == (0 if peaks[0] <= limit else last)
    else:
        assert peaks[level] <= limit
        assert level == 0 or peaks[level - 1] > limit


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_every_rank_fits_and_one_layer_less_does_not(name: str) -> None:
    run = run_of(LAYOUTS[name])
    most = max(peaks_of(run, "none"))
    least = max(peaks_of(run, "full"))
    limit = 0.65 * least + 0.35 * most
    choice = choose_recompute(MeasuredRun.of(run), limit)
    assert list(choice.peaks) == peaks_of(run, choice.policy.text)  # by all blocks, not five
    assert list(choice.peaks_without) == peaks_of(run, "none")
    assert max(choice.peaks) <= limit
    measured = recompute_choice._MeasuredLevels(MeasuredRun.of(run))
    for row, level in enumerate(choice.levels):
        stages = measured.modes(row, level)
        chosen = {choice.policy.of_layers(stage, len(modes)) for stage, modes in stages.items()}
        assert chosen == set(stages.values())
        assert level == 0 or measured.peak(row, level - 1) > limit
        assert (choice.flops[row] > 1) == any("full" in modes for modes in chosen)


def test_early_ranks_of_1f1b_recompute_more() -> None:
    run = run_of("--model.layers 8 --mesh pp4 --batch.global_size 16")
    limit = 1.05 * peaks_of(run, "none")[2]
    choice = choose_recompute(MeasuredRun.of(run), limit)
    modes = [choice.policy.of_layers(stage, 2) for stage in range(4)]
    assert modes[0] != ("none", "none")
    assert modes[2] == modes[3] == ("none", "none")


def test_compiled_blocks_recompute_as_others_do() -> None:
    run = run_of("--model.layers 4 --mesh dp2 --compile blocks --batch.global_size 8")
    plain = run.with_values({"compile": "off"})
    for mode in ("none", "selective", "full"):
        assert peaks_of(run, mode) == peaks_of(plain, mode)


def test_a_run_records_its_choice_and_a_resume_keeps_it_while_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "--model.layers 4 --mesh pp2 --transport threads --device cpu"
    rest = "--prove.before never --batch.global_size 8 --report False"
    words = [*SIZES, *layout.split(), *rest.split()]
    config = tmp_path / "run.toml"
    config.write_text('[parallel]\nrecompute = "auto"\n')
    run = load([*words], FAMILIES)
    none = peaks_of(run, "none")
    full = peaks_of(run, "full")

    def has_memory(num_bytes: float) -> None:
        has_machine(monkeypatch, 1e12)
        monkeypatch.setattr(auto_recompute, "machine_bytes", lambda: 2 * num_bytes / 0.9)

    def train(*more: str, out: str) -> str:
        folder = str(tmp_path / out)
        assert main(["train", str(config), *words, "--out", folder, *more]) == EXIT_OK
        lines = capsys.readouterr().err.splitlines()
        return next((line for line in lines if line.startswith("recompute auto")), "")

    def recorded(out: str) -> str:
        return str(toml.read(str(tmp_path / out / "run.toml"))["parallel.recompute"])

    def losses(out: str) -> list[float]:
        events = read_run_events(tmp_path / out / "events.jsonl")
        return [event["loss"] for event in events if event["event"] == "step"]

    has_memory(0.6 * none[0] + 0.4 * full[0])
    line = train("--steps", "2", out="auto")
    value = recorded("auto")
    policy = value.removeprefix("auto:")
    assert read_policy(policy).uniform is None
    assert line.startswith(f"recompute auto -> {policy} (at most ")
    assert " without recomputation" in line
    assert re.search("90% of this machine's memory for 2 ranks", line)
    train("--steps", "2", "--parallel.recompute", "none", out="none")
    assert losses("auto") == losses("none")
    line = train("--steps", "3", "--resume", "auto", out="auto")
    assert "(as in " in line
    assert recorded("auto") == value
    has_memory(1.1 * max(none))
    line = train("--steps", "4", "--resume", "auto", "--parallel.recompute", AUTO, out="auto")
    assert line.startswith("recompute auto -> none (at most ")
    assert recorded("auto") == "auto:none"
    has_memory(0.6 * none[0] + 0.4 * full[0])
    line = train("--steps", "5", "--resume", "auto", out="auto")
    assert "; anew, as the recorded choice needs " in line
    assert recorded("auto") == value
    assert len(losses("auto")) == 5


def test_auto_needs_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_recompute, "has_gpus", lambda _: True)
    monkeypatch.setattr(memory_before, "gpu_names", lambda: ("Other",))
    monkeypatch.setattr("weft.run.devices.gpu_names", lambda: ("Other",))
    run = run_of("--parallel.recompute auto")
    with pytest.raises(ConfigError, match="auto needs the memory of the GPU"):
        auto_recompute.choose_recompute_before_ranks(run, is_flag=True)


def test_a_run_without_auto_loads_no_planner() -> None:
    code = (
        "import sys; from weft.start.checked_run import load_checked_run as load;"
        "from weft.start.auto_recompute import choose_recompute_before_ranks as choose;"
        "load(['--parallel.recompute', 'full:1', '--mesh', 'dp2'], choose_recompute=choose);"
        "print([name for name in sys.modules if name.startswith(('weft.planner', 'torch'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


ANSWERS = {
    "pp2": ("--model.layers 8 --mesh pp2 --batch.global_size 16", 0.35,
            "full:1+selective/selective:2+none"),
    "zero 3": ("--model.layers 24 --mesh dp2 --parallel.zero 3 --batch.global_size 8", 0.75,
               "selective:12+none"),
    "zero 3, less": ("--model.layers 24 --mesh dp2 --parallel.zero 3 --batch.global_size 8", 0.35,
                     "full:7+selective"),
    "zero 1": ("--model.layers 16 --mesh dp2 --parallel.zero 1 --batch.global_size 4", 0.35,
               "full:5+selective"),
    "tp cp": ("--model.layers 12 --mesh cp2,tp2 --parallel.sequence True --batch.global_size 4",
              0.75, "selective:8+none"),
    "zero bubble": ("--model.layers 20 --mesh pp2 --pipeline.schedule zero_bubble "
                    "--batch.global_size 16", 0.35, "selective:3+none/selective:1+none"),
}  # fmt: skip
"""Layouts, the limit between the peaks of `full` and `none`, and what was chosen when every level was
measured anew.
"""


@pytest.mark.parametrize(
    "name", ["pp2", *(pytest.param(each, marks=pytest.mark.slow) for each in [*ANSWERS][1:])]
)
def test_the_choice_is_that_of_measurements_of_every_level(name: str) -> None:
    words, share, policy = ANSWERS[name]
    run = run_of(words)
    none, full = (
        max(
            recompute_choice.peaks_of(MeasuredRun.of(run.with_values({"parallel.recompute": each})))
        )
        for each in ("none", "full")
    )
    limit = (1 - share) * full + share * none
    choice = choose_recompute(MeasuredRun.of(run), limit)
    assert choice.policy.text == policy


def test_blocks_that_another_level_has_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of("--model.layers 20 --mesh dp2 --parallel.zero 1 --batch.global_size 4")
    measured = recompute_choice._MeasuredLevels(MeasuredRun.of(run))
    calls = []
    measure_rank = recompute_choice.measure_rank

    def counted(run: MeasuredRun, rank: int) -> RankStep:
        calls.append(run.plan.recompute)
        return measure_rank(run, rank)

    monkeypatch.setattr(recompute_choice, "measure_rank", counted)
    peaks = [measured.peak(0, level) for level in (7, 8, 12)]
    assert calls == ["selective:5+none", "selective:6+none", "selective:5+none"]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("gpu", "mode"), [("NVIDIA H100 80GB HBM3", "offload"), ("NVIDIA B200", "selective")]
)
def test_offload_is_chosen_on_gpus_whose_rate_to_the_host_is_known(
    gpu: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.run.devices.gpu_names", lambda: (gpu,))
    words = "--model.layers 3 --mesh dp2 --parallel.zero 1 --batch.global_size 4 --device cuda"
    sizes = "--model.dim 8192 --model.heads 64 --model.kv_heads 8 --model.ffn 28672"
    run = run_of(f"{words} {sizes} --data.seq_len 2048")
    (peak,) = recompute_choice.peaks_of(MeasuredRun.of(run))
    answer = auto_recompute._choice(run, 0.98 * peak, host_bytes=1e12)
    assert read_policy(answer["policy"]).modes == {mode, "none"}
    assert (answer["copied_gb_s"] > 0) == (mode == "offload")


@pytest.mark.slow
def test_activations_go_to_the_host_where_their_copies_take_no_time() -> None:
    words = "--model.layers 3 --mesh dp2 --parallel.zero 1 --batch.global_size 4 --hardware h100"
    run = MeasuredRun.of(run_of(f"{words} --model.dim 1024 --model.ffn 2048"))
    none, offload = (
        max(
            recompute_choice.peaks_of(
                MeasuredRun.of(run.run.with_values({"parallel.recompute": each}))
            )
        )
        for each in ("none", "offload")
    )
    limit = (none + offload) / 2
    device = find_hardware("h100")

    def chosen(num_bytes: float, gb_s: float) -> RecomputeChoice:
        host = HostMemory(num_bytes, replace(device, host_gb_s=gb_s))
        return choose_recompute(run, limit, host=host)

    plain = choose_recompute(run, limit)
    found = chosen(1e12, 1e6)
    assert found.policy.modes == {"offload", "none"}
    assert max(found.peaks) <= limit
    assert found.flops == (1.0,)
    assert chosen(1e12, found.copied_gb_s / HOST_SHARE * 1.01) == found
    assert chosen(1e12, found.copied_gb_s / HOST_SHARE * 0.99) == plain, (
        "copies would be waited for"
    )
    assert chosen(1e5, 1e6) == plain, "the host has too little memory"
    assert choose_recompute(run, none, host=HostMemory(1e12, device)).levels == (0,)
