"""Every collective on random meshes, axes, shapes and sizes, compared with numpy."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.dimension import all_axes
from weft.core.mesh import Axis, Mesh
from weft.testing import run_ranks

NUMPY_REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod, "avg": np.mean}
MAX_RANKS = 12


@dataclass(frozen=True)
class Case:
    """A mesh, some of its axes taken together, and a seed of the ranks' data."""

    mesh: Mesh
    axis: Axis
    seed: int

    @property
    def degree(self):
        return self.mesh.degree(self.axis)

    def group(self, rank):
        return self.mesh.group(rank, self.axis)

    def index(self, rank):
        return self.mesh.index(rank, self.axis)

    def data(self, rank, shape):
        """The array of `rank`: any process can compute that of any rank."""
        return np.random.default_rng([self.seed, rank]).standard_normal(shape)

    def tensor(self, rank, shape):
        return torch.from_numpy(np.asarray(self.data(rank, shape)))


@st.composite
def meshes(draw):
    num_axes = draw(st.integers(1, 3))
    names = draw(st.permutations(all_axes()))[:num_axes]
    degrees = [draw(st.integers(1, 3)) for _ in names]
    if math.prod(degrees) > MAX_RANKS:
        return Mesh(((names[0], 3),))
    return Mesh(tuple(zip(names, degrees, strict=True)))


@st.composite
def cases(draw):
    mesh = draw(meshes())
    names = [name for name, _ in mesh.axes]
    axis = draw(st.sets(st.sampled_from(names), min_size=1))
    seed = draw(st.integers(0, 99))
    return Case(mesh, tuple(axis), seed)


@settings(max_examples=60)
@given(cases(), st.lists(st.integers(0, 4), max_size=3), st.sampled_from(sorted(NUMPY_REDUCTIONS)))
def test_all_reduce_reduces_over_exactly_the_group(case, shape, op):
    def all_reduce(comm):
        x = case.tensor(comm.rank, shape)
        return comm.all_reduce(x, case.axis, op=op)

    for rank, got in enumerate(run_ranks(case.mesh, all_reduce)):
        arrays = [case.data(member, shape) for member in case.group(rank)]
        expected = NUMPY_REDUCTIONS[op](np.stack(arrays), axis=0)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Split:
    """A dimension of a tensor of shape (2, 3, 2), and a length along it for each member of a group."""

    dim: int
    sizes: list[int]

    def shape(self, length):
        """(2, 3, 2) with `length` along the dimension."""
        shape = [2, 3, 2]
        shape[self.dim] = length
        return shape


@st.composite
def splits(draw):
    """A case and a split for its group."""
    case = draw(cases())
    lengths = st.lists(st.integers(0, 3), min_size=case.degree, max_size=case.degree)
    dim = draw(st.integers(-3, 2))
    return case, Split(dim, draw(lengths))


@settings(max_examples=60)
@given(splits())
def test_all_gather_concatenates_in_group_order(case_and_split):
    case, split = case_and_split

    def all_gather(comm):
        own_length = split.sizes[comm.index(case.axis)]
        x = case.tensor(comm.rank, split.shape(own_length))
        return comm.all_gather(x, case.axis, dim=split.dim, sizes=split.sizes)

    for rank, got in enumerate(run_ranks(case.mesh, all_gather)):
        pieces = []
        for member, length in zip(case.group(rank), split.sizes, strict=True):
            pieces.append(case.data(member, split.shape(length)))
        expected = np.concatenate(pieces, axis=split.dim)
        np.testing.assert_array_equal(got.numpy(), expected)


@settings(max_examples=60)
@given(splits())
def test_reduce_scatter_is_a_slice_of_the_sum(case_and_split):
    case, split = case_and_split
    shape = split.shape(sum(split.sizes))

    def reduce_scatter(comm):
        x = case.tensor(comm.rank, shape)
        return comm.reduce_scatter(x, case.axis, dim=split.dim, sizes=split.sizes)

    for rank, got in enumerate(run_ranks(case.mesh, reduce_scatter)):
        total = sum(case.data(member, shape) for member in case.group(rank))
        index = case.index(rank)
        start = sum(split.sizes[:index])
        stop = start + split.sizes[index]
        expected = np.take(total, range(start, stop), axis=split.dim)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(cases(), st.data())
def test_all_to_all_transposes_the_pieces(case, data):
    row = st.lists(st.integers(0, 3), min_size=case.degree, max_size=case.degree)
    sizes = data.draw(
        st.lists(row, min_size=case.degree, max_size=case.degree)
    )  # sizes[i][j]: rows from i to j

    def all_to_all(comm):
        index = comm.index(case.axis)
        shape = (sum(sizes[index]), 2)
        x = case.tensor(comm.rank, shape)
        recv_sizes = [sent[index] for sent in sizes]
        return comm.all_to_all(x, case.axis, send_sizes=sizes[index], recv_sizes=recv_sizes)

    for rank, got in enumerate(run_ranks(case.mesh, all_to_all)):
        index = case.index(rank)
        pieces = []
        for member, sent in zip(case.group(rank), sizes, strict=True):
            array = case.data(member, (sum(sent), 2))
            start = sum(sent[:index])
            pieces.append(array[start : start + sent[index]])
        np.testing.assert_array_equal(got.numpy(), np.concatenate(pieces))


@settings(max_examples=40)
@given(cases(), st.data())
def test_messages_of_a_random_permutation_arrive(case, data):
    destinations = data.draw(st.permutations(range(case.degree)))

    def exchange(comm):
        index = comm.index(case.axis)
        x = case.tensor(comm.rank, (3,))
        if destinations[index] == index:
            return x
        out = torch.zeros(3, dtype=torch.float64)
        sending = comm.start_send(x, case.axis, to=destinations[index])
        comm.recv(out, case.axis, source=destinations.index(index))
        sending.wait()
        return out

    for rank, got in enumerate(run_ranks(case.mesh, exchange)):
        source = destinations.index(case.index(rank))
        sender = case.group(rank)[source]
        np.testing.assert_array_equal(got.numpy(), case.data(sender, (3,)))
