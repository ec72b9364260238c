"""Memory before the start: a bound from the config, measured peaks of the local ranks, and containers with less memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.load import load
from weft.config.run import Run
from weft.errors import ConfigError
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import measure
from weft.start import memory_before, memory_bound
from weft.start.memory_before import check_memory, memory_fault
from weft.start.memory_bound import local_states
from weft.start.rules.machine import memory_faults

GIB = 2**30


def run_of(words: str) -> Run:
    return load(words.split(), FAMILIES)


def has_machine(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    for module in (memory_bound, memory_before):
        monkeypatch.setattr(module, "machine_bytes", lambda: int(num_bytes))
    monkeypatch.setattr(memory_before, "has_gpus", lambda _: False)


def test_states_of_all_local_ranks_are_compared_with_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_machine(monkeypatch, 24 * GIB)
    (fault,) = memory_faults(run_of("--model.preset llama3-3b --mesh dp2 --device cpu"))
    assert "at least 96 GiB for 2 ranks" in str(fault)
    words = "--model.preset llama3-1b --mesh dp2 --device cpu"
    (fault,) = memory_faults(run_of(words))
    assert fault.fix == "--parallel.zero 2, or fewer ranks on this machine"
    assert not list(memory_faults(run_of(f"{words} --parallel.zero 2")))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp2,tp2", "pp2,dp2", "dp4"])
def test_the_bound_is_below_what_ranks_hold(zero: int, mesh: str) -> None:
    sizes = "--model.layers 4 --model.dim 256 --model.ffn 512 --batch.global_size 8"
    run = run_of(f"{sizes} --mesh {mesh} --parallel.zero {zero}")
    held = sum(role.num_ranks * role.step.kept.total for role in measure(MeasuredRun.of(run)))
    assert 0.5 * held < local_states(run, zero) <= 1.3 * held  # gradients are not kept by zero 2


def test_a_run_that_may_be_too_large_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("--mesh dp2 --batch.micro_size 2 --device cpu")
    (role,) = measure(MeasuredRun.of(run))
    has_machine(monkeypatch, 2 * role.memory.peak)
    check_memory(run)
    has_machine(monkeypatch, 2 * role.memory.peak - 1)
    with pytest.raises(
        ConfigError, match=r"the ranks are larger than the memory \(got .* for 2 ranks"
    ):
        check_memory(run)


def test_a_small_run_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    has_machine(monkeypatch, 24 * GIB)
    monkeypatch.setattr(memory_before, "_measured", lambda _: pytest.fail("it was measured"))
    check_memory(run_of("--mesh dp2 --device cpu"))


def test_a_run_that_cannot_be_measured_says_so_and_compares_what_the_config_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of("--model.layers 400 --device cpu --mesh dp2")
    states = local_states(run, 0)
    has_machine(monkeypatch, 1.5 * states)
    check_memory(run)
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(
        "note: memory: the peaks of the ranks are not known before the start: a rank has 403 blocks"
    )
    assert "activations of 2 ranks are estimated at " in note
    monkeypatch.setattr(memory_before, "has_gpus", lambda _: True)
    monkeypatch.setattr(memory_before, "gpu_bytes", lambda: states / 2 - 1)
    with pytest.raises(ConfigError, match=r"a rank is larger than its GPU \(got at least "):
        check_memory(run)


def test_the_fullest_rank_is_compared_with_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("--mesh pp2 --parallel.recompute full")
    peaks = {"0": 90 * GIB, "1": 70 * GIB}
    assert memory_fault(run, peaks, 95 * GIB, is_on_gpu=True) is None
    fault = memory_fault(run, peaks, 80 * GIB, is_on_gpu=True)
    assert fault is not None
    assert "a rank is larger than its GPU (got 90 GiB for 1 rank; need at most 80 GiB)" in str(
        fault
    )
    names = {"NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"}
    monkeypatch.setattr(memory_before, "gpu_names", lambda: tuple(names))
    assert memory_before.gpu_bytes() == pytest.approx(40e9, rel=0.1)
    monkeypatch.setattr(memory_before, "gpu_names", lambda: ("NVIDIA H100 80GB HBM3", "Other"))
    assert memory_before.gpu_bytes() is None


def test_a_container_has_the_memory_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_bound, "MEMORY_LIMITS", (str(limit),))
    whole = memory_bound.machine_bytes()
    limit.write_text("max\n")
    assert memory_bound.machine_bytes() == whole
    limit.write_text("1048576\n")
    assert memory_bound.machine_bytes() == 2**20
