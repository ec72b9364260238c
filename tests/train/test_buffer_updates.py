"""Buffers that training updates: the order of the samples, BatchNorm of torch, resumes on other layouts, one device."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.comm.comm import Comm
from weft.config.load import load
from weft.errors import PlanError
from weft.models import FAMILIES
from weft.models.common.buffer_updates import (
    BufferRecords,
    ignoring_updates,
    record_batch_norm,
    updating_modules,
)
from weft.parallel.model.compiled_block import compiled_block
from weft.parallel.model.recorded_buffers import apply_updates
from weft.prove.plain_buffers import PlainBuffers
from weft.prove.proof import prove
from weft.prove.subject import Subject
from weft.testing import run_ranks
from weft.train.init_from import place_buffers
from weft_selftest.mutants.buffer_faults import MUTANTS
from weft_selftest.mutants.plant import planted
from weft_selftest.mutants.trial import try_mutants

USER_MODELS = Path(__file__).parents[1] / "user_models"
RESNET = USER_MODELS / "resnet.py"
FLOAT64 = {"params": "float64", "compute": "float64", "reduce": "float64"}
KEYS = {
    "batch.global_size": 16,
    "batch.micro_size": 2,
    "transport": "threads",
    "precision": FLOAT64,
    "optim": {"warmup": 0, "decay": "constant"},
    "prove": {"before": "never"},
    "eval": {"source": "digits", "every": 3, "batches": 4},
}
TOLERANCE = 1e-9


class Digits(nn.Module):
    """Buffers whose values say which numbers came in which order."""

    number: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, digit: Tensor) -> Tensor:
        weft.update_buffers(self, digit)
        return digit

    def update_buffers(self, digit: Tensor) -> None:
        self.count += 1
        self.number.mul_(10).add_(digit)


class Transposed(nn.BatchNorm1d):
    """A subclass whose forward calls that of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def test_elsewhere_buffers_are_updated_at_once_and_not_in_evaluation() -> None:
    module = Digits()
    module(torch.tensor(3.0, requires_grad=True))
    module(torch.tensor(4.0))
    module.eval()(torch.tensor(5.0))
    assert module.number.item() == 34
    assert not module.number.requires_grad


def test_without_values_the_method_is_not_called() -> None:
    """It may read the numbers in its buffers, such as the place in a queue."""
    with torch.device("meta"):
        module = Digits()
    number = module.number
    module.update_buffers = lambda digit: number.item()  # type: ignore[method-assign, assignment, return-value]
    module(torch.ones((), device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        module.update_buffers(number)


@pytest.mark.parametrize("num_runs", [1, 4])
def test_updates_are_made_in_the_order_of_the_samples(num_runs: int) -> None:
    def rank(comm: Comm) -> tuple[float, int]:
        module = Digits()
        records = BufferRecords({"digits": module})
        for microbatch in (1, 0):  # as a schedule may run them
            place = microbatch * 4 + comm.rank if num_runs == 1 else 2 * comm.rank + microbatch
            with records.of_microbatch(microbatch):
                module(torch.tensor(float(place + 1)))
        module(torch.tensor(9.0))  # recomputed: not recorded
        apply_updates(records, comm, microbatches=2, num_runs=num_runs)
        apply_updates(records, comm, microbatches=2, num_runs=num_runs)  # nothing is left
        return module.number.item(), int(module.count.item())

    assert run_ranks("dp4", rank) == [(12345678.0, 8)] * 4


def test_micro_batches_with_other_calls_are_named() -> None:
    def rank(comm: Comm) -> None:
        module = Digits()
        records = BufferRecords({"layer0.digits": module})
        with records.of_microbatch(1):
            module(torch.tensor(1.0))
        apply_updates(records, comm, microbatches=2, num_runs=1)

    with pytest.raises(PlanError, match=r"layer0\.digits: hands other values to update_buffers"):
        run_ranks("dp1", rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(3),
        lambda: nn.BatchNorm1d(3, momentum=None, affine=False),
        lambda: nn.BatchNorm1d(3, momentum=0.0, eps=0.1),
        lambda: Transposed(3, momentum=0.7),
    ],
)
def test_a_recording_batch_norm_is_that_of_torch(
    make: Callable[[], nn.BatchNorm1d], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    is_narrow = dtype.itemsize < 4
    right, own = make(), make()
    for module in (right, own):
        module.to(torch.float32 if is_narrow else dtype)
    record_batch_norm(own)
    assert type(own).__name__ == type(right).__name__
    assert isinstance(own, type(right))
    for _ in range(3):
        x = torch.randn(3, 3, 3, dtype=torch.float64).to(dtype)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        weights = torch.randn(3, 3, 3, dtype=torch.float64).to(dtype)
        outputs = [module(one) for module, one in zip((right, own), inputs, strict=True)]
        for out in outputs:
            (out * weights).sum().backward()
        assert outputs[1].dtype == dtype
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=0)
    tolerance = torch.finfo(torch.float32 if is_narrow else dtype).eps * 8
    for name, buffer in right.named_buffers():
        of_own = own.get_buffer(name)
        assert of_own.dtype == buffer.dtype
        torch.testing.assert_close(of_own, buffer, rtol=tolerance, atol=tolerance)
    x = torch.randn(3, 3, 3, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(own.eval()(x), right.eval()(x), rtol=tolerance, atol=tolerance)


def test_ignored_updates_are_those_of_copies_too() -> None:
    module = nn.BatchNorm1d(2)
    with ignoring_updates({"norm": module}):
        copied = copy.deepcopy(module)
        module(torch.randn(4, 2))
    copied(torch.randn(4, 2))
    assert not module.get_buffer("running_mean").any()
    assert not copied.get_buffer("running_mean").any()
    module(torch.randn(4, 2))
    assert module.get_buffer("running_mean").all()
    assert module.num_batches_tracked == 1


def test_blocks_that_update_buffers_are_not_compiled() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert compiled_block("layer0", block, drops_out=False) is block
    assert compiled_block("layer0", block[0], drops_out=False) is not block[0]


def test_modules_that_update_buffers_are_found_by_name() -> None:
    block = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), Digits())
    assert list(updating_modules(block, "layer0")) == ["layer0.0", "layer0.2"]


@pytest.mark.parametrize("compute", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [torch.float64, torch.float32, torch.bfloat16])
def test_buffers_of_the_proof_s_reference_are_those_of_ranks(
    compute: torch.dtype, params: torch.dtype
) -> None:
    """Before, a table kept its float32 in the reference of a run in bfloat16, and BatchNorm was an error
    in that of a run with parameters in float64 that computes in float32.
    """
    table = nn.Module()
    table.register_buffer("angles", torch.linspace(0, 1, 7))
    table.register_buffer("places", torch.arange(7))
    block = nn.Sequential(table, nn.BatchNorm1d(2), Digits())
    of_rank, of_reference = copy.deepcopy(block), copy.deepcopy(block)
    place_buffers([of_rank], device=torch.device("cpu"), dtype=compute, updated=params)
    PlainBuffers({"layer0": of_reference}, compute=compute, dtype=params)
    assert of_reference.get_buffer("0.angles").dtype == compute
    for (name, one), (_, other) in zip(
        of_rank.named_buffers(), of_reference.named_buffers(), strict=True
    ):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    x = torch.randn(3, 2, dtype=compute)
    record_batch_norm(of_rank)
    for module in (of_rank[1], of_reference[1]):
        for param in module.parameters():
            param.data = param.data.to(compute)
    tolerance = 8 * torch.finfo(compute).eps
    for is_training in (True, False):
        outputs = [block[1].train(is_training)(x) for block in (of_rank, of_reference)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)


def trained(out: Path, **keys: Any) -> weft.Result:
    """A run of the small ResNet."""
    return weft.train({**KEYS, "out": str(out), "steps": 3, **keys}, model=RESNET)


def evaluation_loss(result: weft.Result) -> float:
    """The last one that a run has logged."""
    lines = (result.out / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [float(event["loss"]) for event in events if event["event"] == "eval"][-1]


def difference(one: weft.Result, other: weft.Result) -> float:
    """The largest one of a parameter or buffer."""
    assert one.model.keys() == other.model.keys()
    assert "layer1.norm2.running_var" in one.model
    assert one.model["head.norm.num_batches_tracked"].dtype == torch.int64
    return max(
        float((value.double() - other.model[name].double()).abs().max())
        for name, value in one.model.items()
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"mesh": "dp4", "parallel.zero": 3},
        pytest.param({"mesh": "pp2 dp2"}, marks=pytest.mark.slow),
    ],
    ids=["dp4 zero3", "pp2 dp2"],
)
def test_a_run_resumed_on_another_layout_is_that_of_one_device(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    alone = trained(tmp_path / "alone")
    assert int(alone.model["stem.norm.num_batches_tracked"]) == 3 * 8
    first = trained(tmp_path / "first", mesh="pp2", steps=1)
    resumed = trained(tmp_path / "resumed", resume=str(first.checkpoint), **keys)
    assert resumed.history[0]["step"] == 2
    assert difference(resumed, alone) < TOLERANCE
    assert evaluation_loss(resumed) == pytest.approx(evaluation_loss(alone), abs=TOLERANCE)


@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_running_values_have_the_same_bits_on_all_numbers_of_data_ranks(
    zero: int, tmp_path: Path
) -> None:
    keys = {"deterministic": True, "precision": {}, "steps": 2, "parallel.zero": zero}
    one, other = (trained(tmp_path / mesh, mesh=mesh, **keys) for mesh in ("dp2", "dp4"))
    assert difference(one, other) == 0


def test_a_planted_fault_of_buffers_is_named() -> None:
    words = ("--mesh", "dp2", "--batch.global_size", "8", "--model.layers", "1")
    subject = Subject.of(load([str(RESNET), *words], FAMILIES), steps=1).in_float64()
    mutant = next(each for each in MUTANTS if "rank_after_rank" in each.name)
    with planted(mutant):
        report = prove(subject)
    assert not report.holds
    assert report.first is not None
    assert "running_" in report.first.tensor
    assert report.first.axis == "dp"


@pytest.mark.slow
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_every_fault_of_buffers_is_found_at_its_place(name: str) -> None:
    (result,) = try_mutants([mutant for mutant in MUTANTS if mutant.name == name])
    assert result.has_effect
    assert result.is_seen_by_proof, result.message
    assert result.is_attributed, (result.axis, result.block, result.message)


FROZEN = """
from dataclasses import dataclass
from torch import nn

from tests.user_models.batch_norm import AXES, Config as Sizes
from tests.user_models.batch_norm import blocks as plain


class Net(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


@dataclass(frozen=True)
class Config(Sizes):
    bias: bool = True


def blocks(c):
    return Net(*plain(c))
"""


def test_a_train_method_that_freezes_a_norm_is_called(tmp_path: Path) -> None:
    """As in a loop of torch: the norm reads its running values, and does not update them."""
    file = tmp_path / "frozen.py"
    file.write_text(FROZEN)
    keys = {**KEYS, "data.source": "digits", "out": str(tmp_path / "run"), "steps": 2}
    model = weft.train({**keys, "mesh": "dp2"}, model=str(file)).model
    assert int(model["1.num_batches_tracked"]) == 0
    assert torch.equal(model["1.running_var"], torch.ones(8))
    assert weft.prove({**keys, "mesh": "dp2"}, model=str(file), first=1).holds
