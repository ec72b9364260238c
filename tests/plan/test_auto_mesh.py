"""`mesh = "auto"`: the layout that is chosen, training with it, resume, determinism, devices, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tiny_run import MODEL, SEQUENCES, TINY, write_text
from weft.cli import main
from weft.config.hardware import find_hardware, hardware_of_cuda
from weft.config.load import load, try_load
from weft.config.run import Run
from weft.core.mesh import Mesh
from weft.core.node_placement import NodePlacement
from weft.errors import EXIT_OK, EXIT_USER, ConfigError, PlanError
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.simulate.predict import predict
from weft.planner.simulate.speeds import Speeds
from weft.start.auto_mesh import choose_mesh
from weft_plan.commands import mesh_search
from weft_plan.commands.mesh_search import (
    DevicesHere,
    MeshSearch,
    assumed_core,
    devices_here,
    on_nodes,
)
from weft_plan.search.candidates import Candidates

SMALL = (*MODEL, *SEQUENCES, "--batch.global_size", "8", "--device", "cpu")


def run_of(*words: str) -> Run:
    return try_load([*SMALL, *words], FAMILIES).run


def legal_of(run: Run, num_ranks: int) -> Candidates:
    devices = DevicesHere(num_ranks, num_ranks, is_joined=False, has_gpus=False)
    search = MeshSearch(run, assumed_core(num_ranks), devices)
    return search.legal_meshes(num_ranks)


def losses(out: Path) -> list[float]:
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


def recorded_mesh(out: Path) -> str:
    found = re.search(r'^mesh = "([^"]*)"', (out / "run.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_training_on_the_chosen_mesh_equals_training_on_it_by_name_and_resume_keeps_the_recorded_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path)
    common = (*TINY, "--data.source", str(text), "--prove.before", "never", "--device", "cpu")
    auto = tmp_path / "auto"
    named = tmp_path / "named"
    chosen = ("--mesh", "auto", "--nproc", "2")
    actual = main(["train", *common, *chosen, "--steps", "2", "--out", str(auto)])
    assert actual == EXIT_OK
    note = re.search(r"^mesh auto -> (\S+) \(of (\d+) legal layouts of 2 ranks; next best "
                     r"\S+, [\d.]+ times the predicted step; speeds of the CPU: assumed\)$",
                     capsys.readouterr().err, re.MULTILINE)  # fmt: skip
    assert note is not None
    mesh = note[1]
    assert recorded_mesh(auto) == mesh
    assert Mesh.parse(mesh).size == 2
    actual = main(["train", *common, "--mesh", mesh, "--steps", "2", "--out", str(named)])
    assert actual == EXIT_OK
    assert losses(auto) == losses(named)

    other = "tp2" if mesh != "tp2" else "dp2"
    run_file = auto / "run.toml"
    run_file.write_text(run_file.read_text().replace(f'mesh = "{mesh}"', f'mesh = "{other}"'))
    config = tmp_path / "config.toml"
    config.write_text('mesh = "auto"\n')
    words = (str(config), *common, "--nproc", "2", "--steps", "3", "--out", str(auto))
    capsys.readouterr()
    assert main(["train", *words, "--resume", "auto"]) == EXIT_OK
    assert f"mesh auto -> {other} (as in {run_file}" in capsys.readouterr().err
    assert recorded_mesh(auto) == other
    assert len(losses(auto)) == 3
    checkpoint = run_of("--resume", str(auto / "ckpt" / "step-000002"))
    assert choose_mesh(checkpoint, is_flag=False).mesh == other
    fresh = choose_mesh(checkpoint.with_values({"nproc": 2}), is_flag=True)
    assert fresh.mesh == mesh


@pytest.mark.slow
def test_the_choice_is_the_fastest_of_all_legal_layouts_and_the_same_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of("--parallel.zero", "1")
    hardware = assumed_core(8)
    speeds = Speeds(hardware)
    seconds = {}
    for group in legal_of(run, 8).groups:
        mesh = group.base.mesh
        seconds[mesh] = predict(
            MeasuredRun.of(run.with_values({"mesh": mesh})), speeds
        ).step.total_s
    assert len(seconds) > 3, "so many are searched"
    best = min(seconds, key=lambda mesh: seconds[mesh])
    chosen = set()
    for rank in ("0", "7"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "29500")
        chosen.add(choose_mesh(run, is_flag=True))
    assert len(chosen) == 1
    (only,) = chosen
    assert only.mesh == best
    assert f"of {len(seconds)} legal layouts of 8 ranks; next best" in only.note


def test_nodes_have_the_ranks_that_the_launcher_has_put_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**table, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    devices = devices_here("cpu", None)
    assert devices.placement == NodePlacement.even(8, 2)
    h100 = find_hardware("h100")
    assert on_nodes(h100, None).node == 8
    assert on_nodes(h100, devices.placement).node == 2


def test_only_the_mesh_is_chosen() -> None:
    run = run_of("--parallel.zero", "2", "--batch.micro_size", "2", "--parallel.recompute", "full")
    found = legal_of(run, 4)
    assert len(found) == len(found.groups) > 1
    for group in found.groups:
        for layout in group:
            mesh_alone = run.with_values({"mesh": layout.mesh})
            assert run.with_values(layout.values) == mesh_alone


def test_one_rank_and_the_only_legal_layout_are_chosen_without_a_prediction() -> None:
    alone = choose_mesh(run_of("--nproc", "1"), is_flag=True)
    assert alone.mesh == ""
    assert alone.note == "mesh auto -> one rank (the only legal layout of 1 rank)"
    words = (
        "--nproc",
        "2",
        "--batch.global_size",
        "1",
        "--model.layers",
        "1",
        "--pipeline.split",
        "1",
    )
    assert choose_mesh(run_of(*words), is_flag=True).mesh == "tp2"


def test_the_number_of_ranks_is_that_of_the_launcher_else_nproc_else_gpus_else_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_search, "num_cores", lambda: 6)
    assert devices_here("auto", None).num_ranks == 6
    monkeypatch.setattr(mesh_search, "_num_gpus", lambda device: 4)
    assert devices_here("auto", None).num_ranks == 4
    assert devices_here("auto", 3).num_ranks == 3
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-4]")
    devices = devices_here("auto", None)
    assert devices.num_ranks == 16
    assert devices.num_local == 4
    assert devices.is_joined is True


def test_a_gpu_that_the_table_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_search, "_num_gpus", lambda device: 2)
    monkeypatch.setattr("weft.run.devices.gpu_names", lambda: ("NVIDIA Nothing",))
    with pytest.raises(ConfigError, match=r"does not have \(got NVIDIA Nothing\)"):
        choose_mesh(run_of(), is_flag=True)
    found = hardware_of_cuda("NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found.name == "h100"


def test_layouts_that_do_not_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("--nproc", "2")
    monkeypatch.setattr(mesh_search, "HEADROOM", 1.0)
    message = (
        r"mesh: auto finds no layout of 2 ranks that fits a CPU rank \(got at least [\d.]+ KiB"
    )
    with pytest.raises(ConfigError, match=message):
        choose_mesh(run, is_flag=True)


def test_a_failure_to_measure_is_an_error_of_the_mesh() -> None:
    def fail() -> None:
        raise ValueError("no kernel on meta")

    assert mesh_search._apart(lambda: [1, "dp2"]) == [1, "dp2"]
    with pytest.raises(PlanError, match=r"cannot measure the layouts \(got ValueError: no kernel"):
        mesh_search._apart(fail)


def test_other_commands_and_stored_configs_name_their_mesh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="mesh: is not chosen here"):
        load(["--mesh", "auto"], FAMILIES)
    assert main(["launch", "slurm", "--mesh", "auto", "--dry-run"]) == EXIT_USER
    assert "mesh: auto is chosen by `weft train`" in capsys.readouterr().err


def test_faults_of_other_keys_are_reported_together_without_one_of_the_mesh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--mesh", "auto", "--nproc", "2", "--data.source", "nowhere", "--seed", "-1")
    assert main(["train", *words]) == EXIT_USER
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: seed: ")
    assert lines[1].startswith("error: data.source: ")
