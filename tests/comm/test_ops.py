"""Differentiable pairs: each backward is the exact adjoint, each can be differentiated again, and they compose."""

import pytest
import torch

from weft.comm import ops
from weft.testing import run_ranks

UNEVEN = {"dp2": [3, 1], "dp3": [1, 0, 3], "pp2 dp2 tp2": [2, 1]}
AXIS = {"dp2": "dp", "dp3": "dp", "pp2 dp2 tp2": "dp"}

# name: (kind of the argument along the axis, kind of the result, op); placements as in Note [Adjoint pairs]
PAIRS = {
    "copy_to_region": ("replicated", "partial", ops.copy_to_region),
    "reduce_from_region": ("partial", "replicated", ops.reduce_from_region),
    "all_gather": ("sharded", "partial", ops.all_gather),
    "reduce_scatter": ("partial", "sharded", ops.reduce_scatter),
    "scatter_to_region": ("replicated", "sharded", ops.scatter_to_region),
    "gather_from_region": ("sharded", "replicated", ops.gather_from_region),
}


def inner(comm, axis, kind, a, b):
    """<a, b> over the group: replicated tensors count once, partial and sharded ones are summed over ranks."""
    here = (a * b).sum()
    return here if kind == "replicated" else comm.all_reduce(here, axis)


def sample(comm, axis, kind, shape, seed):
    """A random tensor: the same on all members if replicated."""
    member = 0 if kind == "replicated" else 1 + comm.index(axis)
    generator = torch.Generator().manual_seed(1000 * seed + member)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def adjoint_gap(comm, axis, pair, shape, **options):
    """|<A x, y> - <x, A* y>| relative to its size, A* as backward has it."""
    kind_in, kind_out, op = PAIRS[pair]
    x = sample(comm, axis, kind_in, shape, 1).requires_grad_()
    out = op(x, comm, axis, **options)
    y = sample(comm, axis, kind_out, out.shape, 2)
    out.backward(y)
    left, right = inner(comm, axis, kind_out, out.detach(), y), inner(comm, axis, kind_in, x.detach(), x.grad)
    return ((left - right).abs() / left.abs()).item()


@pytest.mark.parametrize("mesh", AXIS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("pair", PAIRS)
def test_backward_is_the_exact_adjoint(mesh, pair, dim):
    axis = AXIS[mesh]

    def gap(comm):
        whole = comm.degree(axis) * 2
        length = {"replicated": whole, "partial": whole, "sharded": 2}[PAIRS[pair][0]]
        shape = torch.empty(length, 3, 2).movedim(0, dim).shape
        options = {} if pair in ("copy_to_region", "reduce_from_region") else {"dim": dim}
        return adjoint_gap(comm, axis, pair, shape, **options)

    assert max(run_ranks(mesh, gap)) < 1e-13


@pytest.mark.parametrize("mesh", AXIS)
@pytest.mark.parametrize("pair", ["all_gather", "reduce_scatter", "scatter_to_region", "gather_from_region"])
def test_backward_is_the_exact_adjoint_of_an_uneven_cut(mesh, pair):
    axis, sizes = AXIS[mesh], UNEVEN[mesh]

    def gap(comm):
        length = sizes[comm.index(axis)] if PAIRS[pair][0] == "sharded" else sum(sizes)
        return adjoint_gap(comm, axis, pair, (3, length), dim=1, sizes=sizes)

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
        left, right = (comm.all_reduce((a * b).sum(), "cp") for a, b in ((out.detach(), y), (x.detach(), x.grad)))
        return ((left - right).abs() / left.abs()).item()

    assert max(run_ranks("cp3", gap)) < 1e-13


def test_all_to_all_changes_a_cut_of_the_sequence_into_one_of_the_heads():
    """Uneven both ways: 5 positions on 2 ranks as 3 + 2, 3 heads as 1 + 2."""
    whole_SH = torch.arange(15.0).view(5, 3)
    positions, heads = [3, 2], [1, 2]

    def turn(comm):
        index = comm.index("cp")
        own_SH = whole_SH.split(positions)[index]
        turned_SH = ops.all_to_all(own_SH, comm, "cp", 1, join_dim=0, send_sizes=heads, recv_sizes=positions)
        back_SH = ops.all_to_all(turned_SH, comm, "cp", 0, join_dim=1, send_sizes=positions, recv_sizes=heads)
        return turned_SH, torch.equal(back_SH, own_SH)

    for index, (turned_SH, is_back) in enumerate(run_ranks("cp2", turn)):
        torch.testing.assert_close(turned_SH, whole_SH.split(heads, 1)[index], rtol=0, atol=0)
        assert is_back


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_can_be_differentiated_twice(pair):
    def second(comm):
        op = PAIRS[pair][2]
        x = torch.full((4, 2), 1.0 + comm.rank, dtype=torch.float64, requires_grad=True)
        out = op(x**3, comm, "dp")
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(first.sum(), x)
        return first.detach(), again

    for rank, (first, again) in enumerate(run_ranks("dp2", second)):
        factor = first / (3 * (1.0 + rank) ** 2)  # how often each element counts
        torch.testing.assert_close(again, 6 * (1.0 + rank) * factor, rtol=1e-12, atol=0)


def test_a_column_and_row_parallel_pair_equals_one_device():
    """y = relu(x A) B with A cut by columns and B by rows: copy_to_region before, reduce_from_region after."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 4), (4, 6), (6, 3)))

    def alone():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
        y = torch.relu(leaves[0] @ leaves[1]) @ leaves[2]
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def cut(comm):
        index = comm.index("tp")
        leaves = [x.clone(), a.chunk(3, 1)[index].clone(), b.chunk(3, 0)[index].clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        y = ops.reduce_from_region(
            torch.relu(ops.copy_to_region(leaves[0], comm, "tp") @ leaves[1]) @ leaves[2], comm, "tp"
        )
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    y, dx, da, db = alone()
    for index, (cut_y, cut_dx, cut_da, cut_db) in enumerate(run_ranks("tp3", cut)):
        torch.testing.assert_close((cut_y, cut_dx), (y, dx), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            (cut_da, cut_db), (da.chunk(3, 1)[index], db.chunk(3, 0)[index]), rtol=1e-12, atol=1e-12
        )


def test_along_an_axis_of_degree_1_pairs_are_nothing_at_all():
    def same(comm):
        x = torch.ones(2, requires_grad=True)
        return [op(x, comm, "tp") is x for _, _, op in PAIRS.values()] + [ops.all_to_all(x, comm, "tp") is x]

    assert all(run_ranks("dp2", same)[0])
