"""Deterministic runs: the bits of loss, norm, gradients and parameters are the same for 1, 2, 4 and 8 data ranks."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.matrix.layouts import LR, SEED, Case, batches
from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.core.mesh import Mesh
from weft.data.order import layout_of
from weft.models import FAMILIES
from weft.parallel.zero.fixed_order import Leaf, TreeSum, exact_sum, tree_sum
from weft.testing import run_ranks
from weft.train.build import build_model
from weft.train.optim import make_optimizer, matrices
from weft.train.step import TrainStep

NUM_MICRO = 8
"""Micro-batches of a step over all data ranks."""


@dataclass(frozen=True)
class Trained:
    """Numbers of a run of some steps: everything that must have the same bits."""

    reports: tuple[tuple[float, float], ...]
    tensors: dict[str, Tensor]

    def differences(self, other: Trained) -> list[str]:
        wrong = [] if self.reports == other.reports else ["loss or norm"]
        for name, tensor in self.tensors.items():
            if name in other.tensors and not torch.equal(tensor, other.tensors[name]):
                wrong.append(name)
        return wrong


def train(
    mesh: str,
    *,
    zero: Any = 0,
    optimizer: str = "adamw",
    family: str = "llama3",
    compute: str = "float32",
    fixed_order: bool = True,
    **options: Any,
) -> Trained:
    """Rank 0 of a layout in float32, after three steps on 8 micro-batches each."""
    degree = Mesh.parse(mesh).degree(("dp", "fsdp"))
    options = {"layers": 2, **options}
    case = Case(mesh, family=family, zero=zero, microbatches=NUM_MICRO // degree, **options)
    types = {"params": "float32", "compute": compute, "reduce": "float32"}
    plan = case.plan.model_copy(update=types)
    optim = OptimConfig(name=optimizer)

    def rank(comm: Comm) -> Trained:
        model = build_model(FAMILIES[family], case.config, plan, comm, seed=SEED)
        decayed = matrices(model.params)
        step = TrainStep(
            model,
            make_optimizer=lambda tensors: make_optimizer(tensors, optim, decay_names=decayed),
            clip=case.clip,
            fixed_order=fixed_order,
        )
        samples = layout_of(
            np.arange(plan.global_size),
            index=comm.index(("dp", "fsdp", "ep")),
            degree=comm.degree(("dp", "fsdp", "ep")),
            micro_size=plan.micro_size,
            outer=degree if zero < 2 else 1,
        )
        reports = []
        for batch in batches(case):
            own = batch.columns(index=comm.index("cp"), degree=comm.degree("cp"))
            micro_batches = [own.rows(torch.from_numpy(rows)) for rows in samples]
            report = step(micro_batches, lr=LR)
            reports.append((report.loss, report.grad_norm))
        tensors = {}
        for kind, found in (
            ("gradient", step.grads.full_gradients()),
            ("value", step.grads.full_parameters()),
        ):
            for name, tensor in found.items():
                tensors[f"{kind} of {model.shards[name].owner}"] = tensor
        return Trained(tuple(reports), tensors)

    return run_ranks(mesh, rank)[0]


QUICK = ((2, 0), (8, 0), (4, 1), (4, 3))
"""Data ranks and ZeRO stages; the others run in `make slow`."""


def every_degree() -> list[Any]:
    rows = []
    for row in itertools.product((2, 4, 8), (0, 1, 2, 3)):
        marks = () if row in QUICK else (pytest.mark.slow,)
        rows.append(pytest.param(*row, marks=marks))
    return rows


@pytest.mark.parametrize(("degree", "zero"), every_degree())
def test_data_ranks_and_zero_stages_do_not_change_a_bit(degree: int, zero: int) -> None:
    assert not on_one_rank().differences(train(f"dp{degree}", zero=zero))


@cache
def on_one_rank() -> Trained:
    return train("")


def test_without_a_fixed_order_bits_change() -> None:
    one = train("", fixed_order=False)
    four = train("dp4", fixed_order=False)
    assert one.differences(four)


@pytest.mark.parametrize("optimizer", ["muon", "lion"])
def test_other_optimizers_have_the_same_bits(optimizer: str) -> None:
    reference = train("", optimizer=optimizer)
    assert not reference.differences(train("dp4", zero=3, optimizer=optimizer))


def test_bfloat16_has_the_same_bits() -> None:
    reference = train("", compute="bfloat16")
    assert not reference.differences(train("dp4", zero=2, compute="bfloat16"))


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_sizes_that_are_no_multiples_of_a_vector_have_the_same_bits(zero: int) -> None:
    """DeepSeek's latent vectors of 10 and 12 entries stand before other matrices in flat memory."""
    assert not deepseek_on_one_rank().differences(train("dp2", zero=zero, family="deepseek"))


@cache
def deepseek_on_one_rank() -> Trained:
    return train("", family="deepseek")


def other_axes() -> list[Any]:
    rows = []
    for rest, quick in (("pp2", 1), ("tp2", 0), ("cp2", 1), ("ep2", 0)):
        family = "qwen3-moe" if rest == "ep2" else "llama3"
        for zero in (1, 3):
            marks = () if zero == quick else (pytest.mark.slow,)
            rows.append(pytest.param(rest, family, zero, marks=marks))
    return rows


@pytest.mark.parametrize(("rest", "family", "zero"), other_axes())
def test_other_axes_keep_the_bits_of_each_other(rest: str, family: str, zero: int) -> None:
    one = train(rest, zero=zero, family=family)
    two = train(f"dp2 {rest}", zero=zero, family=family)
    assert not one.differences(two)


def sharded_inside_of_replicas() -> list[Any]:
    rows = [
        ("dp2 fsdp2", 1, False),
        ("dp2 fsdp4", 3, False),
        ("fsdp2 dp2", 1, True),
        ("fsdp2 dp2", 2, False),
        ("dp2 fsdp2", 2, True),
        ("dp4 fsdp2", 1, True),
        ("fsdp4 dp2", 3, True),
    ]
    return [
        pytest.param(mesh, zero, marks=(pytest.mark.slow,) if is_slow else ())
        for mesh, zero, is_slow in rows
    ]


@pytest.mark.parametrize(("mesh", "zero"), sharded_inside_of_replicas())
def test_copies_of_sharded_states_have_the_same_bits(mesh: str, zero: int) -> None:
    assert not on_one_rank().differences(train(mesh, zero=zero))


@pytest.mark.parametrize(
    ("rest", "family", "zero"),
    [
        ("cp2", "llama3", 1),
        ("ep2", "qwen3-moe", 3),
        pytest.param("cp2", "llama3", 3, marks=pytest.mark.slow),
        pytest.param("ep2", "qwen3-moe", 1, marks=pytest.mark.slow),
        pytest.param("tp2", "llama3", 1, marks=pytest.mark.slow),
        pytest.param("tp2", "llama3", 2, marks=pytest.mark.slow),
    ],
)
def test_copies_of_states_that_other_axes_shard_have_the_same_bits(
    rest: str, family: str, zero: int
) -> None:
    """`rest` is inside of `fsdp`, so the data axes are added first, or last, with it between them."""
    one = train(rest, zero=zero, family=family)
    four = train(f"dp2 fsdp2 {rest}", zero=zero, family=family)
    assert not one.differences(four)


TIED_ON_ONE_RANK = {"grouped": True, "schedule": "zbv", "chunks": 2, "layers": 4}
"""The first and the last stage, which use the tied weight, are on the first pipeline rank."""


@cache
def tied_on_one_rank() -> Trained:
    return train("pp2", **TIED_ON_ONE_RANK)


@pytest.mark.parametrize(
    ("degree", "zero"), [(2, 0), (4, 0), (1, 2), (2, 3), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_a_tied_weight_of_two_stages_of_a_rank_has_the_same_bits(degree: int, zero: int) -> None:
    found = train(f"pp2 dp{degree}", zero=zero, **TIED_ON_ONE_RANK)
    assert not tied_on_one_rank().differences(found)


def test_copies_of_a_tied_weight_of_two_stages_of_a_rank_have_the_same_bits() -> None:
    found = train("pp2 dp2 fsdp2", zero=1, **TIED_ON_ONE_RANK)
    assert not tied_on_one_rank().differences(found)


def test_a_tree_sum_does_not_depend_on_the_order_of_its_leaves() -> None:
    generator = torch.Generator().manual_seed(1)
    leaves = torch.randn(11, 50, generator=generator)
    sums = []
    for seed in range(4):
        order = list(range(len(leaves)))
        random.Random(seed).shuffle(order)
        tree = TreeSum()
        for index in order:
            tree.add(Leaf(0, index), leaves[index].clone())
        total = tree.take()
        assert total is not None
        sums.append(total)
    for other in sums:
        assert torch.equal(sums[0], other)
    assert torch.equal(sums[0], tree_sum(leaves, 0))


def test_leaves_in_order_are_added_as_soon_as_two_are_there() -> None:
    tree = TreeSum()
    most = 0
    for index in range(16):
        tree.add(Leaf(0, index), torch.ones(1))
        most = max(most, len(tree.nodes))
    assert most <= 4


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_an_exact_sum_does_not_depend_on_where_the_numbers_are(scale: float) -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(2)).double() * scale

    def total(mesh: str) -> float:
        def rank(comm: Comm) -> float:
            parts = numbers.tensor_split(3 * comm.mesh.size)
            own = parts[3 * comm.rank : 3 * comm.rank + 3]
            return float(exact_sum(comm, own))

        return run_ranks(mesh, rank)[0]

    totals = {total(mesh) for mesh in ("", "dp2", "dp3")}
    assert len(totals) == 1
    assert totals.pop() == pytest.approx(float(numbers.sum()), rel=1e-12)


def test_an_exact_sum_of_numbers_that_are_not_finite_is_not_finite() -> None:
    def rank(comm: Comm) -> float:
        numbers = torch.tensor([1.0, float("nan")], dtype=torch.float64)
        return float(exact_sum(comm, [numbers]))

    assert np.isnan(run_ranks("dp2", rank)[0])
