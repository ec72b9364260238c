"""weft.train and weft.steps in scripts, and the pytest plugin."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import weft
from tests.programs import programs
from weft.errors import NonFiniteError
from weft.python_api import _prepare, checked_run
from weft.train.step import TrainStep
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.plant import planted

MODEL = Path(__file__).parent / "user_models" / "parallel_block.py"
KEYS = {"batch.global_size": 4, "batch.micro_size": 1, "data": {"seq_len": 16}, "optim.warmup": 0}
PLUGIN_TEST = f"""
import torch, weft

@weft.layouts("dp2", "tp3", )
def test_on_ranks(comm, mesh, tmp_path):
    total = comm.all_reduce(torch.ones(1), mesh[:2]).item()
    assert total == comm.mesh.size and tmp_path.exists()

@weft.layouts("tp2", model={str(MODEL)!r}, batch__global_size=4)
def test_proof(layout_proof):
    assert layout_proof.holds and layout_proof.ranks == 2
"""


def test_a_wrong_config_is_one_fault_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(weft.WeftError, match="tp3 does not divide the model's"):
        weft.train({"mesh": "tp3", "out": str(tmp_path / "run")}, model=MODEL)
    with pytest.raises(weft.WeftError, match="no such file"):
        weft.train({}, model=tmp_path / "missing.py")
    with pytest.raises(weft.WeftError, match="input_ids is no row of tokens"):
        weft.train({}, model=MODEL, data=[[1.5]])
    with pytest.raises(weft.WeftError, match=r"no tokens \(got -1 to 5"):
        weft.train({}, model=MODEL, data=[5, -1])
    with pytest.raises(weft.WeftError, match=r"zero: wrong type .* Fix: 3 without quotes"):
        weft.train({"parallel.zero": "3"})
    with pytest.raises(weft.WeftError, match=r"is no config \(got int"):
        weft.train(3)
    assert not (tmp_path / "run").exists()


class Endless(Dataset[torch.Tensor]):
    """A map-style data set, whose rows have no end for what calls it as a sequence."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(16)


class Pairs(Dataset[dict[str, object]]):
    """A map-style data set as people write them, of a number and its square."""

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"x": torch.full((self.length,), index / 8), "y": np.float32(index**2 / 64)}


class Regression(nn.Module):
    def forward(self, x: torch.Tensor, batch: weft.Batch) -> torch.Tensor:
        assert batch.fields is not None
        return (x.squeeze(1) - batch.fields["y"].to(x.dtype)).square().sum()


@dataclass(frozen=True)
class Width:
    dim: int = 4


REGRESSION = weft.Model(
    Config=Width,
    blocks=lambda c: {
        "layer0": nn.Linear(3, c.dim),
        "layer1": nn.Linear(c.dim, 1),
        "loss": Regression(),
    },
    AXES={"*.weight": (None, None), "*.bias": (None,)},
    INPUTS={"x": weft.InputSpec((3,)), "y": weft.InputSpec()},
    name="regression",
)


@pytest.mark.parametrize(
    "data",
    [
        Pairs(3),
        {
            "x": torch.arange(8)[:, None].expand(8, 3) / 8,
            "y": np.arange(8, dtype=np.float32) ** 2 / 64,
        },
    ],
    ids=["dataset", "arrays"],
)
def test_samples_are_dicts_of_arrays_or_arrays_by_name(data: object, tmp_path: Path) -> None:
    """The losses are those of torch's own loop on the same samples in their order."""
    keys = {"steps": 2, "batch": {"global_size": 8, "micro_size": 4}, "prove": {"before": "never"}}
    config = {**keys, "out": tmp_path / "run", "optim": {"name": "sgd", "lr": 0.1, "warmup": 0}}
    result = weft.train({**config, "optim.clip": 1e9}, model=REGRESSION, data=data)
    torch.manual_seed(1)
    chain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    x, y = torch.stack([torch.full((3,), i / 8) for i in range(8)]), torch.arange(8) ** 2 / 64
    first = (chain(x).squeeze(1) - y).square().mean()
    assert result.history[0]["loss"] == pytest.approx(first.item(), rel=1e-6)
    assert result.history[1]["loss"] < result.history[0]["loss"]


def test_samples_of_other_shapes_are_named(tmp_path: Path) -> None:
    class Ragged(Pairs):
        def __getitem__(self, index: int) -> dict[str, object]:
            return {**super().__getitem__(index), "x": torch.zeros(3 + index // 5)}

    with pytest.raises(weft.WeftError, match="sample 5 of the Ragged has another array"):
        weft.train({"steps": 1, "out": tmp_path / "run"}, model=REGRESSION, data=Ragged())


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "data", [[Endless()], iter([1, 2]), object()], ids=lambda data: type(data).__name__
)
def test_data_of_another_type_is_one_fault_at_once(data: object) -> None:
    with pytest.raises(weft.WeftError, match=r"data: is no data \(got .*an array, tensor or list"):
        weft.train({}, model=MODEL, data=data)


@pytest.mark.parametrize("data", [range(9), (1, 2), array("H", [1, 2]), torch.arange(3)])
def test_tokens_are_any_array_or_list_of_whole_numbers(data: object) -> None:
    checked_run({"data.seq_len": 1}, model=MODEL, data=data)


def test_a_proof_is_a_record_with_its_bounds_and_the_first_difference() -> None:
    report = weft.prove({"mesh": "dp2", **KEYS}, model=MODEL, first=2)
    assert report.verdict == "equal"
    assert report.holds is True
    assert report.ranks == 2
    assert report.steps == 2
    assert report.first is None
    assert report.differences == ()
    for bound in report.bounds:
        assert bound.compared > 0
        assert bound.closest <= 1


def test_a_proof_of_wrong_gradients_names_them() -> None:
    fault = all_mutants()["gradients_are_summed_twice"]
    with planted(fault):
        report = weft.prove({"mesh": "dp2", **KEYS}, model=MODEL, first=1)
    assert not report.holds
    assert report.first is not None
    assert report.first.phase == "reduce"
    assert report.first.axis == "dp"
    assert report.first.relation == "2 times the right values"


@pytest.mark.slow
def test_a_proof_takes_tokens_and_rejects_what_it_does_not_compute(tmp_path: Path) -> None:
    tokens = np.arange(4000) % 251
    assert weft.prove({"mesh": "tp2", **KEYS}, model=MODEL, data=tokens, first=1).holds
    with pytest.raises(weft.WeftError, match="first: is no number of steps"):
        weft.prove({}, model=MODEL, first=0)
    with pytest.raises(weft.WeftError, match="a run folder has its own model"):
        weft.prove(tmp_path, model=MODEL)
    with pytest.raises(weft.WeftError, match="loss: dpo needs preference pairs"):
        weft.prove({"loss": "dpo", "data.source": __file__})
    assert weft.prove({"loss": "dpo", "mesh": "dp2"}, first=1).holds  # on drawn pairs


def test_a_loop_over_steps_is_rejected_on_ranks_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(weft.WeftError, match="runs in one process, not on torchrun's ranks"):
        weft.steps({"mesh": "dp2"})


@pytest.mark.timeout(240)
def test_layouts_of_the_plugin_run_a_test_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PLUGIN_TEST)
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    is_installed = any(entry_points(group="pytest11", name="weft"))
    plugin = () if is_installed else ("-p", "weft.pytest_plugin")
    words = (*plugin, "-p", "no:cacheprovider", "-q", "test_mine.py")
    done = programs().run(code, *words, folder=tmp_path, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.slow
def test_a_loop_that_ends_early_stops_the_run_which_saves(tmp_path: Path) -> None:
    out = tmp_path / "run"
    steps = weft.steps({"mesh": "dp2", "steps": 100_000, "out": str(out), **KEYS}, model=MODEL)
    for step in steps:
        if step["step"] == 3:
            break
    steps.close()
    assert list((out / "ckpt").iterdir())


class UnhappyError(Exception):
    """Raised by a function of a script."""


@pytest.mark.parametrize(
    ("mesh", "transport"),
    [("", "process"), ("dp2", "threads"), pytest.param("dp2", "process", marks=pytest.mark.slow)],
)
def test_an_exception_of_a_callback_saves_ends_the_run_and_is_raised(
    tmp_path: Path, mesh: str, transport: str
) -> None:
    def on_step(step: weft.Step) -> None:
        if step["step"] == 2:
            raise UnhappyError

    keys = {"mesh": mesh, "transport": transport, "prove": {"before": "never"}}
    out = tmp_path / "run"
    with pytest.raises(UnhappyError):
        weft.train({**KEYS, **keys, "steps": 100_000, "out": out}, model=MODEL, on_step=on_step)
    assert list((out / "ckpt").iterdir())


@pytest.mark.parametrize("mesh", ["", "dp2"])
def test_ranks_of_this_process_show_their_model_to_a_callback(tmp_path: Path, mesh: str) -> None:
    """The weights that the callback sees after the last step are those of the checkpoint."""
    seen: dict[str, torch.Tensor] = {}

    def on_step(step: weft.Step) -> None:
        seen.update({name: param.detach().clone() for name, param in step.model.params.items()})

    torch.manual_seed(5)
    state = torch.get_rng_state()
    torch.ones(600, 600).matmul(torch.ones(600, 600))  # this process has computed
    keys = {"mesh": mesh, "transport": "threads", "steps": 2, "prove": {"before": "never"}}
    config = {**KEYS, **keys, "out": tmp_path / "run", "optim": {"lr": np.float64(1e-3)}}
    tokens = torch.arange(4000) % 251
    result = weft.train(config, model=MODEL, data=tokens, on_step=on_step)
    assert result.status == "finished"
    assert result.run.optim.lr == 1e-3
    assert [step["step"] for step in result.history] == [1, 2]
    assert set(seen) == set(result.model)
    for name, tensor in result.model.items():
        assert torch.equal(seen[name], tensor)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(weft.WeftError, match="in the processes of its ranks"):
        _ = result.history[0].model


def test_the_exception_of_a_rank_in_this_process_is_raised_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**KEYS, "steps": 3, "out": tmp_path / "run", "optim.lr": 1e30}
    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        weft.train(config, model=MODEL)

    def failing(self: TrainStep, *_: object, **__: object) -> None:
        raise UnhappyError("in a step")

    monkeypatch.setattr(TrainStep, "__call__", failing)
    with pytest.raises(UnhappyError, match="in a step") as raised:
        weft.train({**KEYS, "steps": 3, "out": tmp_path / "other"}, model=MODEL)
    assert raised.value.__notes__[0].startswith("rank 0")


@pytest.mark.parametrize(
    ("keys", "is_here"),
    [
        ({}, True),
        ({"run.restarts": 2}, False),
        ({"save.memory_every": 1}, False),
        ({"port": 29511}, False),
        ({"mesh": "dp2"}, False),
        ({"mesh": "dp2", "transport": "threads"}, True),
    ],
    ids=str,
)
def test_a_run_that_asks_for_processes_gets_them(keys: dict[str, object], is_here: bool) -> None:
    """Restarts, snapshots and a port are not ignored where one rank could be a thread."""
    assert _prepare({**KEYS, **keys}, MODEL, None).trains_here == is_here


def test_values_keep_their_types(tmp_path: Path) -> None:
    with pytest.raises(weft.WeftError, match=r"steps: wrong type \(got 'many'"):
        weft.train({"steps": "many"}, model=MODEL)
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\nseed = 3\n")
    run = checked_run(file, model=MODEL)
    assert (run.steps, run.seed, run.model.name.endswith("parallel_block.py")) == (7, 3, True)


@pytest.mark.slow
def test_the_history_is_that_of_the_command(tmp_path: Path) -> None:
    seen = []
    config = {"mesh": "dp2", "steps": 3, "out": str(tmp_path / "run"), **KEYS}
    result = weft.train(config, model=MODEL, on_step=seen.append)
    assert [step["step"] for step in result.history] == [1, 2, 3]
    assert list(result.history) == seen
    with pytest.raises(TypeError):
        seen[0]["loss"] = 0.0
    assert result.model["layer0.fc_in.weight"].shape == (64, 16)


@pytest.mark.slow
def test_an_error_of_the_run_is_raised_here(tmp_path: Path) -> None:
    config = {"steps": 3, "out": str(tmp_path / "run"), "optim.lr": 1e30, **KEYS}
    with pytest.raises(weft.WeftError, match="the loss is nan"):
        weft.train(config, model=MODEL)


@pytest.mark.slow
def test_a_mesh_auto_is_chosen_for_training_and_for_a_proof(tmp_path):
    keys = {"mesh": "auto", "nproc": 2, "steps": 2, "device": "cpu", "batch.global_size": 4}
    small = {"model.layers": 2, "model.dim": 16, "model.ffn": 32, "data.seq_len": 16}
    result = weft.train({**keys, **small, "out": str(tmp_path / "run")})
    assert result.run.device_mesh.size == 2
    assert len(result.history) == 2
    assert weft.prove({**keys, **small}, first=1).holds
