"""Products of experts in fp8: outputs and gradients by definition, the operands of the grouped kernel, splits, predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.models.test_linear_products import DTYPES, rows
from weft.core.expert_choice import ExpertDevice, ExpertKernelChoice
from weft.models.common import experts as experts_module
from weft.models.common.experts import (
    ExpertLoads,
    Experts,
    PlannedKernels,
    expert_linear,
    expert_matrices,
)
from weft.models.common.fp8_experts import Fp8ExpertProduct, use_fp8_experts
from weft.parallel.autograd.split_backward import SplitBackward
from weft.prove.plain_fp8 import PlainFp8Experts

LOADS = ((3, 0, 9, 4), (0, 0, 16, 0), (0, 0, 0, 0))
OUT, INTO = 48, 32


def operands(counts: tuple[int, ...], dtype: torch.dtype, *, is_transposed: bool) -> list[Tensor]:
    """x, the weights and biases of 4 experts, with rows of very different lengths."""
    x = rows(max(sum(counts), 2), INTO, dtype=dtype)[: sum(counts)]
    weight = rows(4 * OUT, INTO, dtype=dtype).view(4, OUT, INTO)
    if is_transposed:
        weight = weight.mT.contiguous()
    return [x, weight, rows(4, OUT, dtype=dtype)]


def results(
    product: Callable[..., Tensor], given: list[Tensor], counts: tuple[int, ...]
) -> list[Tensor]:
    """The output, and the gradients of x, weights and biases."""
    x, weight, bias = (each.clone().requires_grad_() for each in given)
    weight_EMK = weight if weight.shape[1] == OUT else weight.mT
    y = product(x, weight_EMK, ExpertLoads(torch.tensor(counts)), bias_EM=bias)
    dy = rows(max(len(y), 2), OUT, dtype=y.dtype)[: len(y)]
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)]


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("counts", LOADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(
    dtype: torch.dtype, counts: tuple[int, ...], is_transposed: bool
) -> None:
    given = operands(counts, dtype, is_transposed=is_transposed)
    found = results(Fp8ExpertProduct(), given, counts)
    right = results(PlainFp8Experts(), given, counts)
    plain = results(expert_linear, given, counts)
    for got, expected in zip(found[:2], right[:2], strict=True):
        assert torch.equal(got, expected)
    if dtype == torch.float64:  # elsewhere another kernel sums in another order
        assert torch.equal(found[2], plain[2])
    for got, expected in zip(found[2:], plain[2:], strict=True):
        torch.testing.assert_close(got, expected)
    if sum(counts):
        error = (found[0] - plain[0]).double().norm() / plain[0].double().norm()
        assert 2**-8 < error < 2**-3
    assert all(got.is_contiguous() for got in found[1:])


def test_the_grouped_kernel_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has it for GPUs alone: rows of a one after the other, columns of b, scales in float32, the
    ends of groups as int32; the products of its groups it has for the CPU, too.
    """
    calls = []

    def grouped(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **options: Any
    ) -> Tensor:
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous()
        assert b.mT.is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert scale_a.shape == (len(a),)
        assert scale_b.shape == (len(b), b.shape[2])
        assert scale_b.is_contiguous()
        assert offs.dtype == torch.int32
        assert options == {"out_dtype": torch.bfloat16, "use_fast_accum": False}
        calls.append(a.shape)
        found, start = [], 0
        for expert, end in enumerate(offs.tolist()):
            scales = {"scale_a": scale_a[start:end, None], "scale_b": scale_b[expert, None]}
            if end > start:
                run = torch._scaled_mm(a[start:end], b[expert], **scales, **options)
                found.append(run)
            start = end
        return torch.cat(found)

    counts = LOADS[0]
    given = operands(counts, torch.bfloat16, is_transposed=False)
    elsewhere = results(Fp8ExpertProduct(), given, counts)
    monkeypatch.setattr(experts_module, "_device_of", lambda x: ExpertDevice("cuda", (9, 0)))
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped)
    found = results(Fp8ExpertProduct(), given, counts)
    assert calls == [(16, INTO), (16, OUT)]
    for got, expected in zip(found, elsewhere, strict=True):
        assert torch.equal(got, expected)


def in_fp8(dtype: torch.dtype, *names: str, device: str = "cpu") -> Experts:
    torch.manual_seed(0)
    experts = Experts(INTO, OUT, num_experts=4).to(device, dtype)
    for name in names:
        use_fp8_experts(experts, name)
    return experts


def test_parameters_are_in_fp8_by_name() -> None:
    loads = ExpertLoads(torch.tensor(LOADS[0]))
    x = rows(16, INTO, dtype=torch.float64)
    none, some, every = (
        in_fp8(torch.float64, *names)(x, loads) for names in ((), ("up",), ("gate", "up", "down"))
    )
    assert not torch.equal(none, some)
    assert not torch.equal(some, every)
    assert expert_matrices(in_fp8(torch.float64)) == {
        "gate": (OUT, INTO),
        "up": (OUT, INTO),
        "down": (INTO, OUT),
    }


def test_experts_with_a_forward_of_their_own_are_not_listed() -> None:
    class Own(Experts):
        def forward(self, x_ND: Tensor, loads: ExpertLoads) -> Tensor:
            return x_ND

    assert expert_matrices(Own(INTO, OUT, num_experts=4)) == {}


def test_a_split_backward_computes_each_product_once() -> None:
    found = []
    for is_split in (False, True):
        experts = in_fp8(torch.float64, "gate", "up", "down")
        x = rows(16, INTO, dtype=torch.float64).requires_grad_()
        loads = ExpertLoads(torch.tensor(LOADS[0]))
        split = SplitBackward(experts.parameters())
        with FlopCounterMode(display=False) as counter:
            if is_split:
                with split:
                    y = experts(x, loads)
            else:
                y = experts(x, loads)
            forward = counter.get_total_flops()
            y.backward(torch.ones_like(y))
            assert counter.get_total_flops() == (2 if is_split else 3) * forward
            split.backward_weights()
            assert counter.get_total_flops() == 3 * forward
        found.append([x.grad, *(weight.grad for weight in experts.parameters())])
    for whole, in_two in zip(*found, strict=True):
        assert torch.equal(whole, in_two)


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        ((9, 0), {"grouped (float8_e4m3fn on cuda)", "grouped (bfloat16 on cuda)"}),
        (
            (10, 0),
            {
                "loop (grouped_mm of rows in fp8 needs a GPU of capability 9.x)",
                "grouped (bfloat16 on cuda)",
            },
        ),
    ],
)
def test_predictions_choose_the_kernel_of_the_planned_device(
    capability: tuple[int, int], kernels: set[str]
) -> None:
    experts = in_fp8(torch.bfloat16, "gate", "up", "down", device="meta")
    choices: list[ExpertKernelChoice] = []
    planned = PlannedKernels(ExpertDevice("cuda", capability), choices.append)
    counts = torch.empty(4, device="meta", dtype=torch.int64)
    x = torch.empty(16, INTO, device="meta", dtype=torch.bfloat16, requires_grad=True)
    y = experts(x, ExpertLoads(counts, planned=planned))
    y.backward(torch.empty_like(y))
    assert set(map(str, choices)) == kernels
    assert x.grad is not None
