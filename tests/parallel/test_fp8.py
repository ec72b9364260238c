"""Linears and experts in fp8 under tensor parallelism: scales of rows that ranks share, and layouts against one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.prove.faults import report_of
from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.models.common.experts import ExpertLoads, expert_product
from weft.models.common.fp8_experts import share_expert_rows, use_fp8_experts
from weft.models.common.linear_products import use_fp8
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.tensor.region import Region, SharedEntries
from weft.testing import run_ranks
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.plant import planted

FP8 = "--precision.linears fp8"


def uneven(*shape: int, dim: int) -> Tensor:
    """Numbers of which the second half along a dim is smaller by 2^-16: it has entries below the normal
    range of e4m3 if it has the scale of the first half, and not if it has one of its own.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = shape[dim] // 2
    x.narrow(dim, size, size).mul_(2.0**-16)
    return x


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_row_that_ranks_share_has_one_scale(kind: str) -> None:
    """Of a row-parallel linear in the forward, of a column-parallel one in the backward."""
    dim = 0 if kind == "column" else 1
    whole = nn.Linear(16, 16, bias=False, dtype=torch.float64)
    with torch.no_grad():
        whole.weight.copy_(uneven(16, 16, dim=dim))
    use_fp8(whole)
    x = uneven(4, 16, dim=1)
    dy = uneven(4, 16, dim=1)

    def on(linear: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.clone().requires_grad_()
        weight = linear.get_parameter("weight")
        y = linear(x)
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    y, dx, dw = on(whole, x, dy)

    def rank(comm: Comm) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        own = slice(8 * comm.index("tp"), 8 * comm.index("tp") + 8)
        shard = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        rows, columns = (own, slice(None)) if kind == "column" else (slice(None), own)
        shard.weight = nn.Parameter(whole.weight.detach()[rows, columns].clone())
        use_fp8(shard)
        region = Region(comm, "tp", False)
        if kind == "column":
            linear = ColumnParallelLinear.from_linear(shard, region, SharedEntries(region))
            found = on(linear, x, dy[:, own])
            return found, (y[:, own], dx, dw[own])
        found = on(RowParallelLinear.from_linear(shard, region), x[:, own], dy)
        return found, (y, dx[:, own], dw[:, own])

    for found, right in run_ranks("tp2", rank):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_tokens", [6, 0])
@pytest.mark.parametrize("dim", [1, 2], ids=["out", "in"])
def test_a_row_of_experts_that_ranks_share_has_one_scale(dim: int, num_tokens: int) -> None:
    """Also where the experts of these ranks have no tokens."""
    weight = torch.stack([uneven(16, 16, dim=dim - 1) * 2.0**expert for expert in range(2)])
    counts = torch.tensor([num_tokens // 2] * 2)
    x, dy = (uneven(6, 16, dim=1)[:num_tokens] for _ in range(2))

    def on(experts: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        weight = experts.get_parameter("matrix")
        y = expert_product(experts, "matrix")(x, weight, ExpertLoads(counts))
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    def holding(weight: Tensor) -> nn.Module:
        experts = nn.Module()
        experts.matrix = nn.Parameter(weight.clone())
        use_fp8_experts(experts, "matrix")
        return experts

    y, dx, dw = on(holding(weight), x, dy)

    def rank(comm: Comm) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        own = slice(8 * comm.index("tp"), 8 * comm.index("tp") + 8)
        region = Region(comm, "tp", False)
        shard = holding(weight[:, own] if dim == 1 else weight[..., own])
        share_expert_rows(shard, "matrix", region.largest, dim=dim)
        if dim == 1:
            y_own, dx_part, dw_own = on(shard, x, dy[:, own])
            return (y_own, region.leave(dx_part), dw_own), (y[:, own], dx, dw[:, own])
        y_part, dx_own, dw_own = on(shard, x[:, own], dy)
        return (region.leave(y_part), dx_own, dw_own), (y, dx[:, own], dw[..., own])

    for found, right in run_ranks("tp2", rank):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "words",
    [
        '--model.name qwen3-moe --mesh "ep2 tp2" --parallel.zero 3 --parallel.recompute selective',
        *(
            pytest.param(f"--model.name qwen3-moe {layout}", marks=pytest.mark.slow)
            for layout in (
                "--mesh dp2",
                "--mesh ep2",
                "--mesh tp2 --parallel.sequence True --parallel.recompute full",
                "--mesh pp2 --precision.fp8_exclude experts.up",
                '--mesh "pp2 tp2" --pipeline.schedule zero_bubble',
            )
        ),
        pytest.param("--mesh ep2 --model.name hf:gpt_oss", marks=pytest.mark.slow),
        pytest.param("--mesh tp2 --model.name hf:mixtral", marks=pytest.mark.slow),
        '--mesh "dp2 tp2" --parallel.zero 3 --parallel.sequence True --parallel.recompute full',
        "--model.name gpt2 --mesh cp2",
        pytest.param('--mesh "pp2 tp2" --pipeline.schedule zero_bubble', marks=pytest.mark.slow),
        pytest.param("--mesh tp2 --lora.rank 2 --lora.dora True", marks=pytest.mark.slow),
        pytest.param("--mesh tp2 --model.name hf:olmo2", marks=pytest.mark.slow),
        pytest.param(
            "--mesh tp2 --model.name deepseek --precision.fp8_exclude attn.q_a attn.kv_a",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_layout_with_linears_in_fp8_is_equal_in_float64(words: str) -> None:
    report = report_of(f"{words} {FP8} --precision.compute bfloat16", steps=1)
    assert report.holds, "\n".join(report.lines())
    (compared,) = report.passes  # in float64 alone
    assert compared.dtype == "float64, linears in fp8"
    assert max(bound.largest for bound in compared.bounds) < 1e-10


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rows_in_fp8_are_scaled_by_the_smallest_of_their_parts", "--mesh tp2"),
        ("experts_in_fp8_have_the_scales_of_the_next_expert", "--mesh ep2 --model.name qwen3-moe"),
    ],
)
def test_another_scale_is_found(name: str, words: str) -> None:
    with planted(all_mutants()[name]):
        report = report_of(f"{words} {FP8}", steps=1)
    assert not report.holds


@pytest.mark.parametrize(
    ("words", "linear"),
    [("--mesh tp2 --model.name deepseek", "attn.q_a"), ("--mesh tp4", "attn.k")],
)
def test_a_linear_that_rounds_a_part_of_its_gradient_is_rejected(words: str, linear: str) -> None:
    """In a latent attention, and where ranks share heads of keys and values, whole projections are
    inside the region of the heads.
    """
    fix = rf"{linear}: .* Fix: add {linear} to --precision.fp8_excl"
    with pytest.raises(PlanError, match=fix):
        report_of(f"{words} {FP8}", steps=1)
