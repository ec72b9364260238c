"""Differentiable collectives: each backward is the exact adjoint, each can be differentiated again, and they compose."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from weft.comm import ops
from weft.testing import run_ranks


@dataclass(frozen=True)
class Pair:
    """A function of Note [Adjoint pairs] and the placements of its argument and result along the
    axis.
    """

    function: Callable
    argument: str
    result: str
    has_dim: bool = True


PAIRS = {
    "copy_to_region": Pair(ops.copy_to_region, "replicated", "partial", has_dim=False),
    "reduce_from_region": Pair(ops.reduce_from_region, "partial", "replicated", has_dim=False),
    "all_gather": Pair(ops.all_gather, "sharded", "partial"),
    "reduce_scatter": Pair(ops.reduce_scatter, "partial", "sharded"),
    "scatter_to_region": Pair(ops.scatter_to_region, "replicated", "sharded"),
    "gather_from_region": Pair(ops.gather_from_region, "sharded", "replicated"),
}
PAIRS_WITH_DIM = [name for name, pair in PAIRS.items() if pair.has_dim]

AXIS = "dp"
MESHES = ["dp2", "dp3", "pp2 dp2 tp2"]
UNEVEN_SIZES = {"dp2": [3, 1], "dp3": [1, 0, 3], "pp2 dp2 tp2": [2, 1]}


def inner_product(comm, axis, placement, a, b):
    """<a, b> over the group: replicated tensors count once, partial and sharded ones are summed
    over ranks.
    """
    local = (a * b).sum()
    if placement == "replicated":
        return local
    return comm.all_reduce(local, axis)


def random_tensor(comm, placement, shape, *, seed):
    """A random tensor: the same on all members if replicated."""
    member = 0 if placement == "replicated" else 1 + comm.index(AXIS)
    generator = torch.Generator().manual_seed(1000 * seed + member)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def relative_gap(left, right):
    gap = (left - right).abs() / left.abs()
    return gap.item()


def adjoint_gap(comm, pair, shape, **options):
    """|<A x, y> - <x, A* y>| relative to its size, with A* from backward."""
    x = random_tensor(comm, pair.argument, shape, seed=1).requires_grad_()
    out = pair.function(x, comm, AXIS, **options)
    y = random_tensor(comm, pair.result, out.shape, seed=2)
    out.backward(y)
    left = inner_product(comm, AXIS, pair.result, out.detach(), y)
    right = inner_product(comm, AXIS, pair.argument, x.detach(), x.grad)
    return relative_gap(left, right)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", PAIRS)
def test_backward_is_the_exact_adjoint(mesh, name, dim):
    pair = PAIRS[name]

    def gap(comm):
        length = 2 if pair.argument == "sharded" else 2 * comm.degree(AXIS)
        shape = [3, 2]
        shape.insert(dim if dim >= 0 else len(shape), length)
        options = {"dim": dim} if pair.has_dim else {}
        return adjoint_gap(comm, pair, shape, **options)

    assert max(run_ranks(mesh, gap)) < 1e-13


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PAIRS_WITH_DIM)
def test_backward_is_the_exact_adjoint_with_uneven_shards(mesh, name):
    pair = PAIRS[name]
    sizes = UNEVEN_SIZES[mesh]

    def gap(comm):
        if pair.argument == "sharded":
            length = sizes[comm.index(AXIS)]
        else:
            length = sum(sizes)
        return adjoint_gap(comm, pair, (3, length), dim=1, sizes=sizes)

    assert max(run_ranks(mesh, gap)) < 1e-13


@pytest.mark.parametrize("join_dim", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_all_to_all_backward_is_its_exact_adjoint(dim, join_dim):
    def gap(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(3, 6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
        out = ops.all_to_all(x, comm, "cp", dim, join_dim=join_dim)
        y = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        out.backward(y)
        left = inner_product(comm, "cp", "sharded", out.detach(), y)
        right = inner_product(comm, "cp", "sharded", x.detach(), x.grad)
        return relative_gap(left, right)

    assert max(run_ranks("cp3", gap)) < 1e-13


def test_all_to_all_turns_sequence_shards_into_head_shards():
    """Uneven both ways: 5 positions on 2 ranks as 3 + 2, 3 heads as 1 + 2."""
    whole_SH = torch.arange(15.0).view(5, 3)
    positions, heads = [3, 2], [1, 2]

    def to_heads_and_back(comm):
        own_SH = whole_SH.split(positions)[comm.index("cp")]
        by_heads_SH = ops.all_to_all(
            own_SH, comm, "cp", 1, join_dim=0, send_sizes=heads, recv_sizes=positions
        )
        back_SH = ops.all_to_all(
            by_heads_SH, comm, "cp", 0, join_dim=1, send_sizes=positions, recv_sizes=heads
        )
        return by_heads_SH, torch.equal(back_SH, own_SH)

    head_shards = whole_SH.split(heads, 1)
    for index, (by_heads_SH, is_back) in enumerate(run_ranks("cp2", to_heads_and_back)):
        torch.testing.assert_close(by_heads_SH, head_shards[index], rtol=0, atol=0)
        assert is_back


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_can_be_differentiated_twice(name):
    pair = PAIRS[name]

    def two_gradients(comm):
        x = torch.full((4, 2), 1.0 + comm.rank, dtype=torch.float64, requires_grad=True)
        out = pair.function(x**3, comm, "dp")
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.detach(), second

    for rank, (first, second) in enumerate(run_ranks("dp2", two_gradients)):
        value = 1.0 + rank
        times_counted = first / (3 * value**2)
        torch.testing.assert_close(second, 6 * value * times_counted, rtol=1e-12, atol=0)


def column_and_row_layers(x, a, b, enter, leave):
    """y = relu(x A) B with the region between `enter` and `leave`; (y, gradients of x, A and B) of
    sum y^2.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    own_x, own_a, own_b = leaves
    hidden = torch.relu(enter(own_x) @ own_a)
    y = leave(hidden @ own_b)
    y.square().sum().backward()
    return y.detach(), own_x.grad, own_a.grad, own_b.grad


def test_a_column_and_row_parallel_pair_equals_one_device():
    """A is sharded by columns and B by rows: copy_to_region before, reduce_from_region after."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    a = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    b = torch.randn(6, 3, generator=generator, dtype=torch.float64)

    def sharded(comm):
        index = comm.index("tp")
        own_a = a.chunk(3, 1)[index]
        own_b = b.chunk(3, 0)[index]

        def enter(x):
            return ops.copy_to_region(x, comm, "tp")

        def leave(x):
            return ops.reduce_from_region(x, comm, "tp")

        return column_and_row_layers(x, own_a, own_b, enter, leave)

    y, dx, da, db = column_and_row_layers(x, a, b, torch.clone, torch.clone)
    for index, got in enumerate(run_ranks("tp3", sharded)):
        expected = (y, dx, da.chunk(3, 1)[index], db.chunk(3, 0)[index])
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_along_an_axis_of_degree_1_functions_return_their_argument():
    functions = [pair.function for pair in PAIRS.values()]
    functions.append(ops.all_to_all)

    def are_identities(comm):
        x = torch.ones(2, requires_grad=True)
        return [function(x, comm, "tp") is x for function in functions]

    assert all(run_ranks("dp2", are_identities)[0])
