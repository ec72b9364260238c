"""`batch.statistics_size`: BatchNorm over the micro-batches of neighbouring data ranks, against torch's on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.planner.test_step_costs import real_steps
from tests.train.test_buffer_updates import KEYS, RESNET, TOLERANCE, difference, evaluation_loss
from weft.comm.comm import Comm
from weft.config.load import load
from weft.config.other_layouts import on_mesh, other_meshes
from weft.config.run import plan_of
from weft.core.mesh import Mesh
from weft.errors import UserError
from weft.models import FAMILIES
from weft.models.common.batch import forward
from weft.parallel.model.group_statistics import StatisticsGroup, group_batch_norm
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import measure_rank
from weft.planner.measure.step_traffic import step_traffic
from weft.prove.proof import prove
from weft.prove.subject import Subject
from weft.testing import run_ranks
from weft_selftest.mutants.buffer_faults import MUTANTS
from weft_selftest.mutants.plant import planted
from weft_selftest.mutants.trial import try_mutants

NORMED = "weft_selftest.mutants.normed_model"
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("fixed_order", [True, False])
def test_a_group_normalises_as_one_rank_with_its_samples(
    dtype: torch.dtype, size: int, affine: bool, fixed_order: bool
) -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(8, 3, 5, dtype=torch.float64).to(dtype) for _ in range(2))
    weight, bias = torch.rand(2, 3, dtype=torch.promote_types(dtype, torch.float32))
    per_group = 2 * size
    wholes: list[list[Tensor]] = []
    for start in range(0, 8, per_group):
        own = [
            each.clone().double().requires_grad_() for each in (x[start:][:per_group], weight, bias)
        ]
        of_channel = own[1:] if affine else [None, None]
        out = nn.functional.batch_norm(
            own[0], None, None, of_channel[0], of_channel[1], training=True, eps=1e-3
        )
        out.backward(dy[start:][:per_group].double())
        wholes.append([out, *(each.grad for each in own if each.grad is not None)])

    def rank(comm: Comm) -> list[Tensor]:
        group = StatisticsGroup.of(comm, size, fixed_order=fixed_order)
        if group is None:
            group = StatisticsGroup(comm, "dp", 1)
        rows = slice(2 * comm.rank, 2 * comm.rank + 2)
        own = [each.clone().requires_grad_() for each in (x[rows], weight, bias)]
        of_channel = own[1:] if affine else [None, None]
        out, statistics = group_batch_norm(own[0], of_channel[0], of_channel[1], group, 1e-3)
        out.backward(dy[rows])
        assert out.dtype == dtype
        assert not statistics.requires_grad
        return [out, *(each.grad for each in own if each.grad is not None)]

    ranks = run_ranks("dp4", rank)
    for number, whole in enumerate(wholes):
        members = ranks[number * size : number * size + size]
        for place, right in enumerate(whole):
            parts = [member[place].double() for member in members]
            got = torch.cat(parts) if place < 2 else torch.stack(parts).sum(0)
            torch.testing.assert_close(got, right, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_no_digits_of_a_variance_are_lost_where_the_mean_is_large() -> None:
    """As of a sum of squares, of which float32 keeps 7 digits; a rank without samples has no part in it."""
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 9, 2, 64, generator=generator)
    x += 1000
    whole = x.double().requires_grad_()
    nn.functional.batch_norm(whole, None, None, training=True).backward(dy.double())
    assert whole.grad is not None

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        group = StatisticsGroup(comm, "dp", 3)
        rows = (slice(0, 4), slice(0, 0), slice(4, 9))[comm.rank]
        own = x[rows].clone().requires_grad_()
        out, statistics = group_batch_norm(own, None, None, group, 1e-5)
        out.backward(dy[rows])
        assert own.grad is not None
        return statistics, own.grad

    right = torch.stack((x.double().mean((0, 2)), x.double().var((0, 2)))).float()
    ranks = run_ranks("dp3", rank)
    for statistics, _ in ranks:
        torch.testing.assert_close(statistics, right, rtol=1e-5, atol=0)
    got = torch.cat([gradient for _, gradient in ranks]).double()
    torch.testing.assert_close(got, whole.grad, rtol=1e-4, atol=1e-4)


def test_a_group_is_along_the_innermost_axes_that_hold_it() -> None:
    def rank(comm: Comm) -> list[Any]:
        groups = [StatisticsGroup.of(comm, size, fixed_order=False) for size in (1, 2, 4)]
        return [None if group is None else group.axis for group in groups]

    assert run_ranks("dp2 fsdp2", rank) == [[None, ("fsdp",), ("dp", "fsdp")]] * 4


def plain_loop(steps: int) -> dict[str, Tensor]:
    """Parameters and buffers after steps of SGD of torch, with its own BatchNorm, by micro-batches of 8."""
    words = [*WORDS, "--mesh", "dp1", "--batch.micro_size", "8"]
    subject = Subject.of_recorded(load(words, FAMILIES), steps=1).in_float64()

    def rank(comm: Comm) -> dict[str, Tensor]:
        training = subject.build_training(comm, out="", resume=None)
        blocks = dict(subject.family.blocks(subject.model))
        net = nn.ModuleDict(blocks).double()
        for name, param in net.named_parameters():
            param.data = training.step.model.params[name].detach().clone()
        assert not any(hasattr(each, "buffer_records") for each in net.modules())
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        for step in range(steps):
            batches = training.loader.batches(step)
            num_targets = sum(int(batch.num_targets()) for batch in batches)
            optimizer.zero_grad()
            for batch in batches:
                (forward(blocks, batch) / num_targets).backward()
            optimizer.step()
        return {name: value.detach() for name, value in net.state_dict().items()}

    return run_ranks("dp1", rank)[0]


LR = 0.5
WORDS = [
    *(str(RESNET), "--batch.global_size", "16", "--device", "cpu", "--optim.name", "sgd"),
    *(
        "--optim.clip",
        "0",
        "--optim.warmup",
        "0",
        "--optim.decay",
        "constant",
        "--optim.lr",
        str(LR),
    ),
    *("--optim.weight_decay", "0", "--transport", "threads"),
]
SGD: dict[str, Any] = {
    **KEYS,
    "batch.statistics_size": 8,
    "optim": {
        "name": "sgd",
        "clip": 0.0,
        "warmup": 0,
        "decay": "constant",
        "lr": LR,
        "weight_decay": 0.0,
        "momentum": 0.0,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4 zero3": {"mesh": "dp4", "batch.micro_size": 2, "parallel.zero": 3},
    "dp2 fsdp2 zero2": {"mesh": "dp2 fsdp2", "batch.micro_size": 4, "parallel.zero": 2},
    "pp2 dp2 zero bubble, recomputed": {
        "mesh": "pp2 dp2",
        "batch.micro_size": 4,
        "parallel.recompute": "full",
        "pipeline.schedule": "zero_bubble",
    },
    "dp4 in twos": {"mesh": "dp4", "batch.micro_size": 4},
}


def test_every_layout_trains_as_torch_on_one_device(tmp_path: Path) -> None:
    """By SGD without momentum parameters differ as much as the learning rate times their gradients."""
    right = plain_loop(2)
    assert int(right["stem.norm.num_batches_tracked"]) == 2 * 2
    for name, keys in LAYOUTS.items():
        result = weft.train({**SGD, "out": str(tmp_path / name), "steps": 2, **keys}, model=RESNET)
        assert right.keys() == result.model.keys()
        for key, value in right.items():
            error = (result.model[key].double() - value.double()).abs().max()
            assert float(error) < TOLERANCE, (name, key)


def test_a_run_resumed_on_another_layout_is_that_of_one_device(tmp_path: Path) -> None:
    def trained(name: str, **keys: Any) -> weft.Result:
        out = str(tmp_path / name)
        return weft.train({**KEYS, "out": out, "steps": 3, **keys}, model=RESNET)

    alone = trained("alone", **{"batch.micro_size": 8})
    sizes = {"batch.statistics_size": 8, "batch.micro_size": 2, "mesh": "dp4"}
    first = trained("first", steps=1, **sizes)
    sizes = {"batch.statistics_size": 8, "batch.micro_size": 4, "mesh": "pp2 dp2"}
    resumed = trained("resumed", resume=str(first.checkpoint), **sizes)
    assert resumed.history[0]["step"] == 2
    assert int(resumed.model["stem.norm.num_batches_tracked"]) == 3 * 2
    assert difference(resumed, alone) < TOLERANCE
    assert evaluation_loss(resumed) == pytest.approx(evaluation_loss(alone), abs=TOLERANCE)


def test_other_layouts_of_a_run_normalise_as_many_samples_together() -> None:
    """Before, a proof of resumes ended in an assertion: one rank cannot have groups of two micro-batches."""
    sizes = ["--mesh", "dp4", "--batch.micro_size", "2", "--batch.statistics_size", "4"]
    run = load([str(RESNET), *sizes, "--batch.global_size", "16", "--device", "cpu"], FAMILIES)
    assert next(other_meshes(run)) == ""
    micro_sizes = []
    for mesh in ("", "dp2", "dp8"):
        other = on_mesh(run, mesh)
        assert other is not None
        assert other.batch.normalised_size == 4
        micro_sizes.append(other.batch.micro_size)
    assert micro_sizes == [4, 2, 2]


def test_deterministic_runs_have_the_same_bits_on_all_numbers_of_data_ranks(tmp_path: Path) -> None:
    keys = {**KEYS, "deterministic": True, "precision": {}, "steps": 2, "parallel.zero": 2}
    keys |= {"batch.statistics_size": 4}
    one, other = (
        weft.train({**keys, "out": str(tmp_path / mesh), "mesh": mesh}, model=RESNET)
        for mesh in ("dp2", "dp4")
    )
    assert difference(one, other) == 0


MODEL = """
from dataclasses import dataclass
from torch import nn
import torch, weft

class Synchronised(nn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x)

class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x):
        weft.update_buffers(self, x.new_ones(()))
        return x

    def update_buffers(self, number):
        self.number += number

class First(nn.Linear):
    def forward(self, images):
        return super().forward(images.flatten(1).to(self.weight.dtype) / 255)

@dataclass(frozen=True)
class Config:
    image_size: int = 28
    classes: int = 10
    dim: int = 6

def blocks(c):
    first = First(c.image_size**2, c.dim, bias=False)
    return nn.Sequential(first, {norm}, nn.Linear(c.dim, c.classes))

AXES = {{"0.weight": (None, None), "1*": (None,), "2.weight": ("classes", None), "2.bias": ("classes",)}}
"""


def model_with(norm: str, folder: Path) -> str:
    file = folder / "normed.py"
    file.write_text(MODEL.replace("{norm}", norm).replace("{{", "{").replace("}}", "}"))
    return str(file)


@pytest.mark.parametrize("mesh", ["dp2", "tp2 dp2"])
def test_nn_sync_batch_norm_trains_with_one_image_a_rank(mesh: str, tmp_path: Path) -> None:
    """[1, C] has no statistics of its own; in the plain steps torch's forward would ask for a process group."""
    keys = {**KEYS, "data.source": "digits", "mesh": mesh, "batch.global_size": 8, "steps": 1}
    keys |= {"batch.micro_size": 1, "batch.statistics_size": 2, "out": str(tmp_path / "run")}
    model = model_with("nn.SyncBatchNorm(c.dim)", tmp_path)
    assert weft.prove(keys, model=model, first=2).holds
    result = weft.train({**keys, "prove.during": 1}, model=model)
    assert int(result.model["1.num_batches_tracked"]) == 4


NO_KEY = "leave batch.statistics_size out"


@pytest.mark.parametrize(
    ("norm", "keys", "message"),
    [
        ("nn.BatchNorm1d(c.dim)", {"batch.statistics_size": 8}, "Fix: --batch.micro_size 4 or"),
        (
            "nn.BatchNorm1d(c.dim)",
            {"batch.statistics_size": 3},
            "need micro_size 2 times a divisor",
        ),
        ("nn.LayerNorm(c.dim)", {"batch.statistics_size": 4}, NO_KEY),
        ("nn.SyncBatchNorm(c.dim)", {}, "Fix: --batch.statistics_size 4, of all data ranks"),
        ("Synchronised(c.dim)", {"batch.statistics_size": 4}, "a subclass of nn.BatchNorm2d"),
        (
            "nn.Sequential(nn.BatchNorm1d(c.dim), Seen())",
            {"batch.statistics_size": 4},
            "1.1: updates buffers by micro-batches",
        ),
        (
            "nn.BatchNorm1d(c.dim)",
            {"batch.statistics_size": 4, "deterministic": True},
            "Fix: --parallel.zero 2",
        ),
    ],
)
def test_what_is_not_supported_is_rejected_in_one_line(
    norm: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = model_with(norm, tmp_path)
    given = {**KEYS, "data.source": "digits", "out": str(tmp_path / "run"), "mesh": "dp2", **keys}
    with pytest.raises(UserError) as raised:
        weft.train(given, model=model)
    (line,) = str(raised.value).splitlines()
    assert message in line


def test_models_of_weft_have_no_statistics(tmp_path: Path) -> None:
    keys = {"mesh": "dp2", "batch.statistics_size": 4, "out": str(tmp_path)}
    with pytest.raises(UserError, match="is of BatchNorm, which llama3 has not"):
        weft.train(keys)


@pytest.mark.parametrize(
    "mesh", ["dp2", "dp4", pytest.param("pp2 dp2 fsdp2", marks=pytest.mark.slow)]
)
def test_predicted_traffic_is_that_of_a_real_step(mesh: str) -> None:
    sizes = ["--batch.global_size", "16", "--batch.micro_size", "1", "--batch.statistics_size", "2"]
    sizes += ["--parallel.zero", "1"]
    words = ["--model.name", NORMED, "--model.layers", "3", "--data.seq_len", "16"]
    run = load([*words, *sizes, "--mesh", mesh, "--device", "cpu"], FAMILIES)
    for rank, (real, counter) in enumerate(real_steps(run)):
        predicted = measure_rank(MeasuredRun.of(run), rank)
        assert step_traffic(predicted, real.row) == counter.traffic


def test_a_search_measures_blocks_without_the_other_ranks() -> None:
    """One image has no statistics of its own, so that short runs of one rank failed."""
    sizes = ["--mesh", "dp2", "--batch.micro_size", "1", "--batch.statistics_size", "2"]
    run = load([str(RESNET), *sizes, "--device", "cpu"], FAMILIES)
    plan = plan_of(run).model_copy(update={"mesh": Mesh.parse("")})
    measured = measure_rank(MeasuredRun.of(run).with_plan(plan), 0)
    assert not step_traffic(measured, 0)


OF_GROUPS = [mutant for mutant in MUTANTS if "statistics_size" in mutant.layout.options]


def test_a_planted_fault_is_named() -> None:
    words = ("--mesh", "dp2", "--batch.global_size", "8", "--model.layers", "1")
    sizes = ("--batch.micro_size", "2", "--batch.statistics_size", "4")
    subject = Subject.of(load([str(RESNET), *words, *sizes], FAMILIES), steps=1).in_float64()
    mutant = next(each for each in OF_GROUPS if "gradients" in each.name)
    with planted(mutant):
        report = prove(subject)
    assert not report.holds
    assert report.first is not None
    assert "gradient" in report.first.tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", [mutant.name for mutant in OF_GROUPS])
def test_every_fault_of_groups_is_found_at_its_place(name: str) -> None:
    (result,) = try_mutants([mutant for mutant in OF_GROUPS if mutant.name == name])
    assert result.has_effect
    assert result.is_seen_by_proof, result.message
    assert result.is_attributed, (result.axis, result.block, result.message)
