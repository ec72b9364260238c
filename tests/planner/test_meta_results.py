"""Results of operations on the meta device that are reused for equal arguments equal those that torch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.planner.measure.recorder import StepRecorder

META = torch.device("meta")
aten = torch.ops.aten


def called(function: Callable[[], Tensor], recorder: StepRecorder) -> Tensor:
    with recorder:
        return function()


def form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


X = torch.empty(4, 6, device="meta")
CALLS: dict[str, Callable[[], Tensor]] = {
    "a scalar of each type": lambda: torch.ones(3, dtype=torch.int64, device="meta") * 2,
    "... decides the type of the result": lambda: (
        torch.ones(3, dtype=torch.int64, device="meta") * 2.0
    ),
    "strides": lambda: torch.relu(X.t()),
    "a list of tensors": lambda: torch.cat([X, X], dim=1),
    "several results": lambda: torch.topk(X, 2).values,
    "no tensor among the arguments": lambda: torch.arange(5, device="meta"),
    "a broadcast": lambda: X + X[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_reused_result_has_the_form_that_torch_computes(name: str) -> None:
    recorder = StepRecorder(META)
    for other in CALLS.values():
        called(other, recorder)
    actual = form(called(CALLS[name], recorder))
    assert actual == form(CALLS[name]())


def test_a_reused_result_is_a_tensor_of_its_own() -> None:
    recorder = StepRecorder(META)
    first = called(lambda: X + 1, recorder)
    second = called(lambda: X + 1, recorder)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_a_result_that_shares_memory_is_not_reused() -> None:
    """The schema of `_unsafe_view` does not say that it returns its argument's memory."""
    recorder = StepRecorder(META)
    for _ in range(2):
        view = called(lambda: aten._unsafe_view(X, [24]), recorder)
        assert view.untyped_storage()._cdata == X.untyped_storage()._cdata


def test_kernels_of_a_tensor_by_itself_and_by_another_one_differ() -> None:
    """A product of one tensor with itself reads it once."""
    recorder = StepRecorder(META)
    other = torch.empty(4, 6, device="meta")
    recorder.begin("products")
    for _ in range(2):
        called(lambda: X * X, recorder)
        called(lambda: X * other, recorder)
    recorder.end()
    [region] = recorder.regions
    num_bytes = X.numel() * X.element_size()
    sizes = [kernel.num_bytes for kernel in region.kernels.elements()]
    expected = [2 * num_bytes] * 2 + [3 * num_bytes] * 2
    assert sorted(sizes) == expected


def test_a_reused_result_counts_as_memory() -> None:
    recorder = StepRecorder(META)
    recorder.begin("sums")
    for _ in range(3):
        called(lambda: X + 1, recorder)
    recorder.end()
    [region] = recorder.regions
    assert region.workspace == X.numel() * X.element_size()
    assert region.change == 0
