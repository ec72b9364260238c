"""Products of linears in fp8: roundings and scales by definition, gradients, kernels of the device, what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from weft.models.common import linear_products
from weft.models.common.linear_products import Fp8Product, in_e4m3, scales, use_fp8
from weft.parallel.autograd.split_backward import SplitBackward
from weft.prove.plain_fp8 import PlainFp8, e4m3_numbers, nearest_e4m3

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def every_bfloat16() -> Tensor:
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = codes.view(torch.bfloat16).float()
    return numbers[numbers.abs() <= 448]


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different lengths, one of them zero, with entries that are small in their row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    lengths = torch.logspace(-1, 1, shape[0], base=10, dtype=torch.float64).unsqueeze(1)
    x = x * lengths * torch.where(torch.arange(shape[1]) % 5 == 0, 2.0**-16, 1.0)
    x[1] = 0
    return x.to(dtype)


def linear_in_fp8(dtype: torch.dtype) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(32, 48, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(rows(48, 32, dtype=dtype))
    use_fp8(linear)
    return linear, rows(6, 32, dtype=dtype).view(2, 3, 32).requires_grad_()


def test_the_numbers_of_e4m3_are_those_of_torch() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert e4m3_numbers() == tuple(codes.double().tolist())


def test_every_number_is_rounded_as_torch_casts_it() -> None:
    numbers = every_bfloat16()
    cast = numbers.to(torch.float8_e4m3fn).double()
    assert torch.equal(in_e4m3(numbers).double(), cast)
    assert torch.equal(in_e4m3(numbers.double()), cast)
    assert torch.equal(nearest_e4m3(numbers.double()), cast)


def test_float64_is_rounded_once() -> None:
    """By way of float32, what is close to halfway would be rounded twice."""
    numbers = torch.tensor(e4m3_numbers(), dtype=torch.float64)
    halfway = (numbers[1:] + numbers[:-1]) / 2
    above, below = halfway * (1 + 2.0**-40), halfway * (1 - 2.0**-40)
    assert torch.equal(in_e4m3(above), numbers[1:])
    assert torch.equal(in_e4m3(below), numbers[:-1])


def test_a_scale_is_the_largest_power_of_two_that_fits() -> None:
    largest = torch.tensor([448.0, 448.1, 224.0, 224.1, 3.0, 2.0**-20, 1e30])
    found = scales(largest)
    assert found[:4].tolist() == [1.0, 0.5, 2.0, 1.0]
    assert bool(((largest * found <= 448) & (largest * found > 224)).all())
    assert torch.equal(torch.frexp(found).mantissa, torch.full_like(found, 0.5))
    assert scales(torch.zeros(1)).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(dtype: torch.dtype) -> None:
    linear, x = linear_in_fp8(dtype)
    plain = PlainFp8()(x, linear.weight, linear.bias)
    y = linear(x)
    assert torch.equal(y, plain)
    dy = rows(6, 48, dtype=dtype).view(2, 3, 48)
    inputs = (x, linear.weight, linear.bias)
    for found, right in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(plain, inputs, dy), strict=True
    ):
        assert torch.equal(found, right)
    exact = torch.nn.functional.linear(x, linear.weight, linear.bias)
    error = (y.double() - exact.double()).norm() / exact.double().norm()
    assert 2**-8 < error < 2**-3  # of each operand an entry may move by 2^-4
    d_weight = torch.autograd.grad(exact, linear.weight, dy)[0]
    assert torch.equal(torch.autograd.grad(linear(x), linear.weight, dy)[0], d_weight)


def test_the_kernel_of_a_device_computes_what_is_computed_elsewhere(monkeypatch) -> None:
    """torch has the product for the CPU, too; columns of a weight are rows that lie apart."""
    a, b = rows(32, 48, dtype=torch.bfloat16), rows(48, 64, dtype=torch.bfloat16).t()
    elsewhere = Fp8Product().output(a, b, None)
    monkeypatch.setattr(linear_products, "has_fp8_kernel", lambda x, columns: True)
    assert torch.equal(Fp8Product().output(a, b, None), elsewhere)


def test_a_row_that_is_not_finite_has_no_finite_output() -> None:
    linear, x = linear_in_fp8(torch.float32)
    with torch.no_grad():
        x[0, 1, 3] = torch.inf
        x[1, 2, 4] = torch.nan
    finite = linear(x).isfinite().all(-1)
    assert finite.tolist() == [[True, False, True], [True, True, False]]


def test_shapes_are_those_of_torch() -> None:
    linear, _ = linear_in_fp8(torch.float32)
    assert linear(torch.randn(32)).shape == (48,)
    assert linear(torch.empty(0, 32)).shape == (0, 48)
    y = linear(torch.randn(3, 32, requires_grad=True))
    y += 1  # as of nn.Linear, in place
    y.sum().backward()


def test_a_split_backward_computes_each_product_once() -> None:
    found = []
    for split in (None, SplitBackward):
        linear, x = linear_in_fp8(torch.float64)
        mode = None if split is None else split(linear.parameters())
        flops = []
        with FlopCounterMode(display=False) as counter:
            if mode is None:
                y = linear(x)
            else:
                with mode:
                    y = linear(x)
            flops.append(counter.get_total_flops())
            y.backward(torch.ones_like(y))
            flops.append(counter.get_total_flops())
            if mode is not None:
                assert linear.weight.grad is None
                mode.backward_weights()
            flops.append(counter.get_total_flops())
        of_product = flops[0]
        assert flops[-1] == 3 * of_product
        assert mode is None or flops[1] == 2 * of_product
        found.append([x.grad, linear.weight.grad, linear.bias.grad])
    for whole, in_two in zip(*found, strict=True):
        assert torch.equal(whole, in_two)
