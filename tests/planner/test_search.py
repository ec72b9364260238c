"""`weft plan`: legal candidates, the search of the best ones, teaching cases, and what it prints."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from weft.cli import main
from weft.config.hardware import find_hardware
from weft.config.load import load
from weft.config.run import Run
from weft.core.mesh import WIDTH, Mesh
from weft.models import FAMILIES
from weft.planner.candidates import (
    Layout,
    Space,
    candidates,
    factorizations,
    nearest_devices,
    read_layout,
)
from weft.planner.layout_costs import LayoutCosts
from weft.planner.search import SearchLimits, search, smaller_change
from weft.planner.speeds import Speeds

SMALL = "--model.layers 4 --model.dim 64 --model.ffn 128 --data.seq_len 64 --batch.global_size 8"


def run_of(words: str) -> Run:
    return load(words.split(), FAMILIES)


def test_factorizations_are_all_products() -> None:
    assert factorizations(4, 2) == ((1, 4), (2, 2), (4, 1))


def test_every_candidate_fills_the_devices_and_is_legal() -> None:
    run = run_of(SMALL)
    found = candidates(run, Space(8, 8))
    assert len(found) > 500
    for group in found.groups:
        mesh = Mesh.parse(group.base.mesh)
        assert mesh.size == 8
        assert mesh.degree("pp") <= 4
        assert 8 % (mesh.degree("dp") * group.base.micro_size) == 0
    assert any("ep shards experts" in reason for reason in found.illegal)


def test_a_large_model_has_thousands_of_candidates() -> None:
    run = run_of("--model.preset llama3-70b --data.seq_len 8192 --batch.global_size 512")
    assert len(candidates(run, Space(256, 8))) > 2_000


def test_the_tensor_axis_is_innermost() -> None:
    found = candidates(run_of(SMALL), Space(8, 4))
    for group in found.groups:
        assert "tp" not in group.base.mesh.split(" ")[:-1]


def test_devices_that_no_layout_fills_have_neighbours_that_one_fills() -> None:
    run = run_of(SMALL)
    assert not candidates(run, Space(7, 8)).groups
    assert nearest_devices(run, Space(7, 8)) == (6, 8) or nearest_devices(run, Space(7, 8)) == (
        4,
        8,
    )


@pytest.mark.slow
def test_the_text_fits_80_columns_and_ends_with_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", *SMALL.split(), "--devices", "2", "--hardware", "h100", "--measured", "2"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("weft train")
    assert max(map(len, lines[:-1])) <= WIDTH


@pytest.mark.slow
def test_json_has_the_best_and_the_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *SMALL.split(), "--devices", "2", "--hardware", "h100", "--measured", "2"]
    assert main([*words, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["best"]
    counted = sum(fields["rejected"].values()) + len(fields["best"])
    assert counted <= fields["candidates"]


def plan_output(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["plan", *words.split(), "--hardware", "h100"])
    return code, " ".join(capsys.readouterr().out.split())


def best_of(words: str, num_devices: int) -> Layout:
    """The best layout on H100 devices, of the first one that is measured."""
    run = run_of(f"{words} --precision.compute bfloat16")
    hardware = find_hardware("h100")
    pinned = frozenset({"pipeline.schedule", "parallel.recompute"})
    found = candidates(run, Space(num_devices, hardware.node, pinned))
    costs = LayoutCosts(run, Speeds(hardware))
    limits = SearchLimits(0.9 * hardware.memory_bytes, most_measured=1)
    return search(found, costs, limits, target="cost").best[0].layout


NARROW = "--model.layers 4 --model.dim 2048 --model.ffn 8192 --model.heads 16 --model.kv_heads 16"
WIDE = "--model.layers 8 --model.dim 12288 --model.ffn 49152 --model.heads 64 --model.kv_heads 64"
LARGE = (
    "--model.layers 128 --model.dim 32768 --model.ffn 87040 --model.heads 256"
    " --model.kv_heads 256 --model.vocab 128000 --data.seq_len 8192 --batch.global_size 64"
)


@pytest.mark.slow
def test_a_small_model_with_a_large_batch_takes_data_parallelism() -> None:
    layout = best_of(f"{NARROW} --data.seq_len 2048 --batch.global_size 256", 8)
    assert layout.degree("dp") == 8


@pytest.mark.slow
def test_a_long_sequence_takes_context_parallelism() -> None:
    layout = best_of(f"{NARROW} --data.seq_len 131072 --batch.global_size 1", 8)
    assert layout.degree("cp") > 1


@pytest.mark.slow
def test_in_a_node_tensor_parallelism_is_better_than_a_pipeline() -> None:
    words = f"{WIDE} --data.seq_len 4096 --batch.global_size 4 --parallel.recompute full"
    layout = best_of(words, 8)
    assert layout.degree("tp") > layout.degree("pp")


@pytest.mark.slow
def test_a_model_of_a_trillion_parameters_does_not_fit_and_a_change_is_named() -> None:
    run = run_of(f"{LARGE} --precision.compute bfloat16")
    hardware = find_hardware("h100")
    costs = LayoutCosts(run, Speeds(hardware))
    named = read_layout("tp8 cp4 pp16 dp2", run)
    capacity = hardware.memory_bytes
    needed = costs.bound(named, costs.blocks(named))
    assert needed.state_bytes > 1.6e12 / 128 * 16 > 2 * capacity  # 16 bytes a parameter
    change, size = smaller_change(named, costs, capacity)
    assert change.zero >= 1
    assert size <= capacity


@pytest.mark.slow
def test_why_names_what_a_layout_misses(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{NARROW} --data.seq_len 64 --batch.global_size 24 --devices 24 --seconds 1"
    _, text = plan_output(f"{words} --headroom 0.999 --why dp24", capsys)
    assert "why not dp24" in text
    assert "it does not fit" in text


def test_dp2_tp4_pp3_has_24_ranks() -> None:
    run = run_of("--batch.global_size 12 --model.layers 6 --model.heads 8 --model.kv_heads 8")
    meshes = [group.base.degrees for group in candidates(run, Space(24, 8)).groups]
    assert (("pp", 3), ("dp", 2), ("tp", 4)) in [tuple(degrees) for degrees in meshes]


@pytest.mark.slow
def test_a_simulated_schedule_takes_the_time_of_the_measured_one() -> None:
    """Within 2%, of a pipeline with and without split backwards."""
    run = run_of(
        f"{NARROW} --data.seq_len 4096 --batch.global_size 32 --precision.compute bfloat16"
    )
    hardware = find_hardware("h100")
    costs = LayoutCosts(run, Speeds(hardware))
    for words in ("pp2 dp2 tp2 zero1 sequence micro1", "pp4 zero_bubble micro1"):
        layout = read_layout(words, run)
        measured = costs.predict(layout).step.total_s
        assert costs.simulated_s(layout) == pytest.approx(measured, rel=0.02)


@pytest.mark.slow
def test_a_limit_of_seconds_ends_the_search_with_a_result() -> None:
    run = run_of(f"{WIDE} --data.seq_len 4096 --batch.global_size 64")
    hardware = find_hardware("h100")
    found = candidates(run, Space(64, hardware.node))
    costs = LayoutCosts(run, Speeds(hardware))
    begin = time.process_time()
    limits = SearchLimits(0.9 * hardware.memory_bytes, seconds=3.0)
    result = search(found, costs, limits, target="cost")
    assert result.is_out_of_time
    assert result.num_candidates > 10_000
    assert time.process_time() - begin < 30


@pytest.mark.slow
def test_scaling_and_a_written_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    words = f"{SMALL} --devices 2 --measured 1 --target cost --scale 1 2 --write {path}"
    code, text = plan_output(words, capsys)
    assert code == 0
    assert "strong scaling" in text
    assert "weak scaling" in text
    assert load([str(path)], FAMILIES).device_mesh.size == 2
