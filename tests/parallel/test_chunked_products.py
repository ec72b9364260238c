"""Products of tensor-parallel linears in chunks: equal to whole ones, forward and backward, and hidden behind one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.planner.test_step_costs import run_of
from tests.prove.faults import report_of
from weft.comm.comm import Comm
from weft.parallel.tensor.chunked_products import (
    gathered_products,
    scattered_linear,
    scattered_product,
)
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.tensor.region import Region, SharedEntries
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.overlap import EXPOSED, step_overlap
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.step_traffic import step_traffic
from weft.testing import run_ranks

CHUNKS = "--parallel.sequence True --parallel.tp_overlap True"
LENGTH, INTO, OUT = 4, 6, 5
"""Of a rank's part of the sequence, and features."""


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_equal(found: object, right: object) -> None:
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_products_are_those_of_whole_sequences(num_ranks: int, num_sequences: int) -> None:
    whole = numbers(num_sequences, LENGTH * num_ranks, INTO)
    of_ranks = numbers(num_ranks, num_sequences, LENGTH * num_ranks, INTO)
    matrices = [numbers(INTO, OUT), numbers(INTO, OUT + 1)]

    def rank(comm: Comm) -> None:
        index = comm.index("tp")
        own = slice(LENGTH * index, LENGTH * (index + 1))
        gathered, outputs = gathered_products(whole[:, own], matrices, comm, "tp")
        assert torch.equal(gathered, whole)
        assert_equal(outputs, [whole @ matrix for matrix in matrices])
        part = scattered_product(of_ranks[index], matrices[0], comm, "tp")
        assert_equal(part, (of_ranks.sum(0) @ matrices[0])[:, own])

    run_ranks(f"tp{num_ranks}", rank)


def region_of_linears(x: Tensor, comm: Comm, *, in_chunks: bool, detour: bool) -> list[Tensor]:
    """What two column-parallel linears and a row-parallel one yield, and all gradients.

    Args:
        detour: whether the second linear reads another tensor than the first.
    """
    region = Region(comm, "tp", True, in_chunks=in_chunks)
    entries = SharedEntries(region)
    plain = [nn.Linear(INTO, OUT, dtype=torch.float64) for _ in range(2)]
    plain.append(nn.Linear(OUT, INTO, dtype=torch.float64))
    for number, linear in enumerate(plain):
        for param in linear.parameters():
            with torch.no_grad():
                param.copy_(numbers(*param.shape) + number + comm.index("tp"))
    first, second = (ColumnParallelLinear.from_linear(each, region, entries) for each in plain[:2])
    first.readers = (first, second)
    row = RowParallelLinear.from_linear(plain[2], region)
    x = x.clone().requires_grad_()
    y = row(first(x) * second(x.clone() if detour else x))
    entries.clear()
    params = [param for linear in plain for param in linear.parameters()]
    return [y.detach(), *torch.autograd.grad(y, [x, *params], numbers(*y.shape))]


@pytest.mark.parametrize("detour", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_linears_in_chunks_are_equal_to_whole_ones(num_ranks: int, detour: bool) -> None:
    whole = numbers(2, LENGTH * num_ranks, INTO)

    def rank(comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        x = whole.chunk(num_ranks, 1)[comm.index("tp")]
        found, right = (
            region_of_linears(x, comm, in_chunks=in_chunks, detour=detour)
            for in_chunks in (True, False)
        )
        return found, right

    for found, right in run_ranks(f"tp{num_ranks}", rank):
        assert_equal(found, right)


def test_a_backward_can_be_differentiated_again() -> None:
    def rank(comm: Comm) -> None:
        x = numbers(1, LENGTH * 2, INTO).requires_grad_()
        weight = numbers(OUT, INTO).requires_grad_()
        y = scattered_linear(x, weight, comm, "tp")
        (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(dx.pow(2).sum(), weight)
        assert twice.isfinite().all()

    run_ranks("tp2", rank)


@pytest.mark.parametrize(
    "words",
    [
        "--mesh tp2 --parallel.recompute selective --model.name gpt2",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                '--mesh "dp2 tp4" --parallel.zero 3 --parallel.recompute full',
                '--mesh "cp2 tp2" --model.name qwen3 --precision.compute bfloat16',
                '--mesh "pp2 tp2" --pipeline.schedule interleaved --pipeline.chunks 2',
                '--mesh "ep2 tp2" --model.name qwen3-moe --parallel.zero 1',
                "--mesh tp2 --model.name deepseek",
                "--mesh tp2 --model.name gemma3",
                "--mesh tp2 --model.name hf:mixtral",
                "--mesh tp2 --lora.rank 2 --lora.dora True",
                "--mesh tp8 --model.heads 8",
            )
        ),
    ],
)
def test_a_layout_in_chunks_is_equal_in_float64(words: str) -> None:
    report = report_of(f"{words} {CHUNKS}", steps=1)
    assert report.holds, "\n".join(report.lines())


def test_what_layers_send_is_hidden_and_as_much_as_before() -> None:
    """The embedding's gradient is still gathered at once, and its output scattered."""

    def step_of(words: str) -> RankStep:
        sizes = "--model.kv_heads 4 --model.layers 2 --batch.global_size 1"
        return measure_rank(MeasuredRun.of(run_of(f"--mesh tp4 {sizes} {words}")), 0)

    whole, in_chunks = step_of("--parallel.sequence True"), step_of(CHUNKS)
    overlap = step_overlap(in_chunks, 0)
    assert EXPOSED not in overlap["tp", "send"]
    assert overlap["tp", "all_gather"][EXPOSED].operations == 1
    assert overlap["tp", "reduce_scatter"][EXPOSED].operations == 1
    sent = [
        sum(each.sent_bytes for (axis, _), each in step_traffic(step, 0).items() if axis == "tp")
        for step in (whole, in_chunks)
    ]
    assert sent[0] == sent[1]
