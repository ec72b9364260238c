"""Rules of types along one axis: what operations give of replicated, sharded and partial tensors, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.parallel.tensor.dims import DimFactor, whole_dims, with_dim
from weft.planner.certificate.axis_types import PARTIAL, VARYING, AxisType, of_dims, replicated
from weft.planner.certificate.type_mode import TypeMode

F = torch.nn.functional


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def typed(mode: TypeMode, text: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor: "R", "P", "V", or "S1" sharded in dim 1."""
    x = tensor(*shape, dtype=dtype)
    return mode.set(x, (axis_type(text, shape),))


def axis_type(text: str, shape: tuple[int, ...]) -> AxisType:
    if text.startswith("S"):
        place = int(text[1:])
        factor = DimFactor(shape[place], sharded=True)
        return of_dims(with_dim(whole_dims(shape), place, (factor,)))
    return {"R": replicated(shape), "P": PARTIAL, "V": VARYING}[text]


def result(mode: TypeMode, x: Tensor) -> str:
    return mode.type_of(x, "tp").text


PRODUCTS = [
    ("S1", "R", "mismatch"),  # columns of x are a shard, rows of w are not
    ("R", "S1", "sharded in dim 1"),  # column-parallel
    ("S1", "S0", "partial"),  # row-parallel: sums over shards
    ("S0", "R", "sharded in dim 0"),  # tokens
    ("P", "R", "partial"),
    ("P", "P", "mismatch"),
    ("R", "R", "replicated"),
    ("V", "R", "varying"),
]


@pytest.mark.parametrize(("left", "right", "expected"), PRODUCTS)
def test_a_product_over_shards_is_partial(left: str, right: str, expected: str) -> None:
    mode = TypeMode(("tp",))
    x, w = typed(mode, left, 6, 4), typed(mode, right, 4, 8)
    with mode:
        out = x @ w
    assert (result(mode, out) if not mode.findings else "mismatch") == expected


SUMS: list[tuple[str, str, str]] = [
    ("P", "P", "partial"),
    ("P", "R", "mismatch"),  # the replicated one would be added once on every rank
    ("P", "S0", "mismatch"),
    ("R", "R", "replicated"),
    ("S0", "S0", "sharded in dim 0"),
    ("S0", "S1", "mismatch"),
    ("S0", "R", "mismatch"),
]


@pytest.mark.parametrize(("left", "right", "expected"), SUMS)
def test_a_sum_of_a_partial_tensor_and_another_is_a_mismatch(
    left: str, right: str, expected: str
) -> None:
    mode = TypeMode(("tp",))
    x, y = typed(mode, left, 6, 4), typed(mode, right, 6, 4)
    with mode:
        out = x + y
    assert (result(mode, out) if not mode.findings else "mismatch") == expected


ONE: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "a sum over shards": (lambda x: x.sum(1), "S1", "partial"),
    "a sum over whole dims": (lambda x: x.sum(0), "S1", "sharded in dim 0"),
    "the largest of a shard": (lambda x: x.amax(1), "S1", "varying"),
    "softmax over shards": (lambda x: x.softmax(1), "S1", "mismatch"),
    "mean over shards": (lambda x: x.mean(1), "S1", "mismatch"),
    "silu of a partial sum": (F.silu, "P", "mismatch"),
    "a number times a partial sum": (lambda x: 2 * x, "P", "partial"),
    "a number and a partial sum": (lambda x: x + 1, "P", "mismatch"),
    "a view": (lambda x: x.view(3, 2, 2, 2), "S1", "sharded in dim 2"),
    "a transposed view": (lambda x: x.view(6, 2, 2).transpose(0, 1), "S1", "sharded in dim 0"),
    "flat": (lambda x: x.flatten(), "S1", "sharded in dim 0"),
    "zeros like a partial sum": (lambda x: torch.zeros_like(x), "P", "zero"),
    "zeros and a partial sum": (lambda x: torch.zeros_like(x) + x, "P", "partial"),
    "rows by strides": (lambda x: x.as_strided((2, 4), (4, 1), 8), "S1", "sharded in dim 1"),
    "a transposed square by strides": (
        lambda x: x[:4].as_strided((4, 4), (1, 4)),
        "S1",
        "sharded in dim 0",
    ),
    "an entry of a partial sum": (lambda x: x[0], "P", "partial"),
}


@pytest.mark.parametrize("name", ONE)
def test_operations_on_one_tensor(name: str) -> None:
    act, text, expected = ONE[name]
    mode = TypeMode(("tp",))
    x = typed(mode, text, 6, 4)
    with mode:
        out = act(x)
    assert (result(mode, out) if not mode.findings else "mismatch") == expected


def test_the_gradient_of_a_norm_on_sharded_tokens_is_partial() -> None:
    mode = TypeMode(("tp",))
    x = typed(mode, "S1", 2, 4, 8).requires_grad_()
    weight = typed(mode, "R", 8).requires_grad_()
    seed = typed(mode, "S1", 2, 4, 8)
    with mode:
        F.layer_norm(x, (8,), weight).backward(seed)
    assert weight.grad is not None
    assert x.grad is not None
    assert result(mode, weight.grad) == "partial"
    assert result(mode, x.grad) == "sharded in dim 1"
    assert not mode.findings


def test_one_head_on_a_rank_is_sharded_in_its_own_dim() -> None:
    mode = TypeMode(("tp",))
    x = typed(mode, "S2", 2, 4, 16)
    with mode:
        by_head = x.unflatten(-1, (-1, 16))
    assert by_head.shape == (2, 4, 1, 16)
    assert result(mode, by_head) == "sharded in dim 2"


def test_pairs_of_one_head_that_are_joined_stay_those_of_a_head() -> None:
    """As rotary code does that turns neighbouring entries."""
    mode = TypeMode(("tp",))
    x = typed(mode, "S1", 2, 1, 4, 8)
    with mode:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    assert result(mode, turned) == "sharded in dim 1"
    assert not mode.findings


def test_one_sequence_on_a_rank_stays_apart_from_its_columns() -> None:
    mode = TypeMode(("tp",))
    x = typed(mode, "S0", 1, 4, 8)
    with mode:
        back = (x.view(4, 8) * 2).view(1, 4, 8)
    assert result(mode, back) == "sharded in dim 0"
    columns = typed(mode, "S1", 1, 4, 8)
    with mode:
        back = (columns.view(4, 8) * 2).view(1, 4, 8)
    assert result(mode, back) == "sharded in dim 1"


@pytest.mark.parametrize(("axis", "place"), [("dp", 0), ("tp", 1), ("cp", 1)])
def test_one_token_on_a_rank_is_a_sequence_or_a_column_by_its_axis(axis: str, place: int) -> None:
    mode = TypeMode((axis,))
    x = typed(mode, f"S{place}", 1, 1, 8)
    with mode:
        back = (x.view(1, 8) * 2).view(1, 1, 8)
        by_head = back.view(1, 1, 8).unflatten(-1, (2, 4)).flatten(2)
    assert mode.type_of(back, axis).text == f"sharded in dim {place}"
    assert mode.type_of(by_head, axis).text == f"sharded in dim {place}"


def test_a_buffer_of_several_gradients_keeps_the_type_of_each() -> None:
    mode = TypeMode(("tp",))
    with mode:
        flat = torch.zeros(12, device="meta")
        flat[:8].view(2, 4).add_(typed(mode, "S0", 2, 4))
        flat[8:].add_(typed(mode, "P", 4))
    assert [piece.types[0].kind for piece in mode.tensors.pieces(flat)] == ["varying", "partial"]
    assert result(mode, flat[:8].view(2, 4)) == "sharded in dim 0"
    assert result(mode, flat[9:11]) == "partial"


def test_a_strided_view_of_stacked_shards_is_typed_as_the_slice_that_it_is() -> None:
    """As selective recomputation makes views of its results: rows of one expert among those of all."""
    mode = TypeMode(("tp",))
    parts = [typed(mode, "S0", 8, 16) for _ in range(4)]
    with mode:
        stacked = torch.cat(parts)
        third = stacked.as_strided((8, 16), (16, 1), 256)
        assert result(mode, third) == "sharded in dim 0"
        between = stacked.narrow(1, 0, 4).as_strided((8, 4), (16, 1), 260)
    assert result(mode, between) == "sharded in dim 0"
    assert not mode.findings


def test_an_operation_without_a_rule_is_reported_and_its_results_are_untyped() -> None:
    mode = TypeMode(("tp",))
    x = typed(mode, "S1", 4, 4)
    with mode:
        out = torch.renorm(x, 2, 0, 1) + 1
    (finding,) = mode.findings.values()
    assert not finding.is_certain
    assert finding.text.startswith("the step: not typed: aten.renorm")
    assert result(mode, out) == "untyped"


def test_sharded_parts_that_are_written_into_zeros_shard_them() -> None:
    """One chunk after the other, and a part of the last dim; along another dim they are another type."""
    mode = TypeMode(("tp",))
    part = typed(mode, "S0", 4, 6)
    with mode:
        whole = torch.zeros(4, 3, 6, device="meta")
        whole[:, 0] = part
        first = result(mode, whole)
        whole[:, 1, :2] = part[:, :2]
        assert first == result(mode, whole)
        across = torch.zeros(4, 3, 6, device="meta")
        across[:, 0] = part
        across[0] = typed(mode, "S0", 3, 6)
    assert first == "sharded in dim 0"
    assert result(mode, across) != first


VIEWS = [((0, 3), (3, 3), True), ((0, 3), (2, 3), False), ((10, 3), (0, 1), False)]


@pytest.mark.parametrize(("one", "other", "is_kept"), VIEWS)
def test_a_write_to_some_columns_keeps_the_types_of_others(
    one: tuple[int, int], other: tuple[int, int], is_kept: bool
) -> None:
    """Of columns that begin and as many as are given, in rows of 12; the third view goes over the
    end of its row.
    """
    mode = TypeMode(("tp",))
    whole = tensor(60)
    views = [whole.as_strided((4, size), (12, 1), start) for start, size in (one, other)]
    for view in views:
        mode.set(view, (PARTIAL,))
    with mode:
        views[0].zero_()
    assert (result(mode, views[1]) == "partial") == is_kept
