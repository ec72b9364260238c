"""Rows in fp8 that a step rounds once: how often weights and inputs are rounded, by layout, and that numbers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.planner.test_step_costs import run_of
from tests.prove.faults import report_of
from weft.models.common import fp8_experts, linear_products
from weft.models.common.fp8_operands import KeptOperands, LastInput, RoundedRows
from weft.models.common.linear_products import product_of, use_fp8
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import measure_rank
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.plant import planted

FP8 = "--precision.linears fp8"


@contextmanager
def counting() -> Iterator[Counter[torch.Size]]:
    """How often tensors of each shape are rounded while it is open."""
    found: Counter[torch.Size] = Counter()
    rounded_rows = linear_products.rounded_rows

    def counted(x: Tensor, *args: object, **kwargs: object) -> RoundedRows:
        found[x.shape] += 1
        return rounded_rows(x, *args, **kwargs)

    with (
        patch.object(linear_products, "rounded_rows", counted),
        patch.object(fp8_experts, "rounded_rows", counted),
    ):
        yield found


def linears(count: int) -> list[tuple[nn.Linear, KeptOperands]]:
    found = []
    for _ in range(count):
        linear = nn.Linear(8, 16, bias=False)
        use_fp8(linear)
        product = product_of(linear)
        assert isinstance(product, linear_products.Fp8Product)
        found.append((linear, product.kept))
    return found


def test_linears_that_read_one_input_round_it_once_in_a_pass() -> None:
    (q, q_kept), (k, k_kept) = linears(2)
    x = torch.randn(3, 8)
    last = LastInput()
    for kept in (q_kept, k_kept):
        kept.begin(last, keeps_weight=False)
    with counting() as rounded:
        right = [q(x), k(x)]
        assert rounded[x.shape] == 1
        x += 1  # other values in the same memory
        changed = k(x)
        assert rounded[x.shape] == 2
        k(x.clone())
        assert rounded[x.shape] == 3
        q_kept.end()
        k_kept.end()
        k(x), k(x)
        assert rounded[x.shape] == 5
        assert rounded[k.weight.shape] == 6
        assert torch.equal(changed, k(x))
    x -= 1
    assert torch.allclose(right[0], q(x), atol=1e-3)


def test_a_weight_is_rounded_once_for_each_use_in_a_pass() -> None:
    ((linear, kept),) = linears(1)
    weight = linear.weight.shape
    with counting() as rounded:
        for _ in range(2):
            kept.begin(LastInput(), keeps_weight=True)
            for _ in range(3):
                linear(torch.randn(3, 8, requires_grad=True)).sum().backward()
            kept.end()
            with torch.no_grad():
                linear.weight.mul_(2)
        assert rounded[weight] == rounded[weight[::-1]] == 2
        x = torch.randn(3, 8)
        assert torch.equal(linear(x), linears_of(linear)(x))


def linears_of(linear: nn.Linear) -> nn.Linear:
    """A linear in fp8 with the same weight, which has kept nothing."""
    ((other, _),) = linears(1)
    other.load_state_dict(linear.state_dict())
    return other


@pytest.mark.parametrize(
    ("words", "of_weights", "of_inputs"),
    [
        # twice (forward, recomputed) of 4 weights in 2 layers and once of 2 transposed ones, then once of all
        ("--mesh dp2 --parallel.zero 1 --parallel.recompute full", 10 + 6, 4 * 2 * (3 + 3 + 3)),
        (
            "--mesh dp2 --parallel.zero 3 --parallel.recompute full",
            10 + 3 * 10,
            4 * 2 * (3 + 3 + 3),
        ),
        ("--mesh pp2,dp2 --pipeline.schedule zero_bubble", 6 + 6, 3 * 2 * (3 + 3)),
    ],
)
def test_a_step_rounds_a_weight_once_unless_its_memory_is_freed(
    words: str, of_weights: int, of_inputs: int
) -> None:
    """The step that predictions record, of whose four micro-batches three are played (of a pipeline two),
    after one of a single micro-batch, in which every use rounds for itself.
    """
    sizes = "--model.layers 2 --model.dim 32 --model.ffn 48 --data.seq_len 24"
    run = run_of(f"{words} {sizes} --batch.global_size 8 {FP8}")
    with counting() as rounded:
        measure_rank(MeasuredRun.of(run), 0)
    assert rounded[torch.Size((48, 32))] == of_weights  # gate, up; down of input gradients
    # read by q k v, by o and by gate up; gradients of what q, o and down yield
    assert rounded[torch.Size((24, 32))] == of_inputs


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights_in_fp8_are_those_of_the_step_before", "--mesh dp2"),
        pytest.param(
            "linears_in_fp8_read_the_input_of_the_linear_before",
            "--mesh dp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "experts_in_fp8_have_the_weights_of_the_step_before",
            "--mesh ep2 --model.name qwen3-moe",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_operands_that_are_kept_too_long_are_found(name: str, words: str) -> None:
    with planted(all_mutants()[name]):
        report = report_of(f"{words} --batch.micro_size 1 {FP8}", steps=2)
    assert not report.holds
