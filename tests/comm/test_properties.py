"""Every operation, on any mesh, axis, shape and cut, against numpy."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.dimension import all_axes
from weft.core.mesh import Mesh
from weft.testing import run_ranks

NUMPY = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod, "avg": np.mean}


@st.composite
def meshes(draw):
    names = draw(st.permutations(all_axes()))[: draw(st.integers(1, 3))]
    degrees = [draw(st.integers(1, 3)) for _ in names]
    return Mesh(tuple(zip(names, degrees, strict=True))) if math.prod(degrees) <= 12 else Mesh(((names[0], 3),))


@st.composite
def layouts(draw):
    """A mesh, some of its axes taken together, and a seed for what each rank brings."""
    mesh = draw(meshes())
    axis = tuple(draw(st.sets(st.sampled_from([name for name, _ in mesh.axes]), min_size=1)))
    return mesh, axis, draw(st.integers(0, 99))


def brought(seed, rank, shape):
    return np.random.default_rng([seed, rank]).standard_normal(shape)


@settings(max_examples=60)
@given(layouts(), st.lists(st.integers(0, 4), max_size=3), st.sampled_from(sorted(NUMPY)))
def test_all_reduce_reduces_over_exactly_the_group(layout, shape, op):
    mesh, axis, seed = layout

    def reduce(comm):
        return comm.all_reduce(torch.from_numpy(np.asarray(brought(seed, comm.rank, shape))), axis, op=op)

    for rank, got in enumerate(run_ranks(mesh, reduce)):
        members = np.stack([brought(seed, member, shape) for member in mesh.group(rank, axis)])
        np.testing.assert_allclose(got.numpy(), NUMPY[op](members, axis=0), rtol=1e-12, atol=1e-12)


@st.composite
def cuts(draw):
    """A layout, a dimension of a 3-d tensor, and a length along it for each member of the group."""
    mesh, axis, seed = draw(layouts())
    sizes = draw(st.lists(st.integers(0, 3), min_size=mesh.degree(axis), max_size=mesh.degree(axis)))
    return mesh, axis, seed, draw(st.integers(-3, 2)), sizes


def shape_with(dim, length):
    shape = [2, 3, 2]
    shape[dim] = length
    return shape


@settings(max_examples=60)
@given(cuts())
def test_all_gather_joins_in_group_order(cut):
    mesh, axis, seed, dim, sizes = cut

    def gather(comm):
        own = brought(seed, comm.rank, shape_with(dim, sizes[comm.index(axis)]))
        return comm.all_gather(torch.from_numpy(own), axis, dim=dim, sizes=sizes)

    for rank, got in enumerate(run_ranks(mesh, gather)):
        group = zip(mesh.group(rank, axis), sizes, strict=True)
        pieces = [brought(seed, member, shape_with(dim, size)) for member, size in group]
        np.testing.assert_array_equal(got.numpy(), np.concatenate(pieces, axis=dim))


@settings(max_examples=60)
@given(cuts())
def test_reduce_scatter_is_a_slice_of_the_sum(cut):
    mesh, axis, seed, dim, sizes = cut
    shape = shape_with(dim, sum(sizes))

    def scatter(comm):
        return comm.reduce_scatter(torch.from_numpy(brought(seed, comm.rank, shape)), axis, dim=dim, sizes=sizes)

    for rank, got in enumerate(run_ranks(mesh, scatter)):
        total = sum(brought(seed, member, shape) for member in mesh.group(rank, axis))
        index = mesh.index(rank, axis)
        start = sum(sizes[:index])
        expected = np.take(total, range(start, start + sizes[index]), axis=dim)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(layouts(), st.data())
def test_all_to_all_transposes_the_pieces(layout, data):
    mesh, axis, seed = layout
    degree = mesh.degree(axis)
    rows = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=degree, max_size=degree), min_size=degree, max_size=degree)
    )

    def transpose(comm):
        index = comm.index(axis)
        own = brought(seed, comm.rank, (sum(rows[index]), 2))
        taken = [row[index] for row in rows]
        return comm.all_to_all(torch.from_numpy(own), axis, send_sizes=rows[index], recv_sizes=taken)

    for rank, got in enumerate(run_ranks(mesh, transpose)):
        index, pieces = mesh.index(rank, axis), []
        for member, row in zip(mesh.group(rank, axis), rows, strict=True):
            start = sum(row[:index])
            pieces.append(brought(seed, member, (sum(row), 2))[start : start + row[index]])
        np.testing.assert_array_equal(got.numpy(), np.concatenate(pieces))


@settings(max_examples=40)
@given(layouts(), st.data())
def test_messages_of_a_random_permutation_arrive(layout, data):
    mesh, axis, seed = layout
    degree = mesh.degree(axis)
    to = data.draw(st.permutations(range(degree)))

    def pass_on(comm):
        index = comm.index(axis)
        own, out = torch.from_numpy(brought(seed, comm.rank, (3,))), torch.zeros(3, dtype=torch.float64)
        if to[index] == index:
            return own
        work = comm.start_send(own, axis, to=to[index])
        comm.recv(out, axis, source=to.index(index))
        work.wait()
        return out

    for rank, got in enumerate(run_ranks(mesh, pass_on)):
        sender = mesh.group(rank, axis)[to.index(mesh.index(rank, axis))]
        np.testing.assert_array_equal(got.numpy(), brought(seed, sender, (3,)))
