"""`Comm`: groups by axis, and invalid arguments."""

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.meta import MetaTransport
from weft.core.mesh import Mesh
from weft.errors import CommError, MeshError


def comm_of(text, rank):
    mesh = Mesh.parse(text)
    return Comm(mesh, rank, MetaTransport(mesh.size, rank, device="cpu"))


def test_groups_are_those_of_the_mesh():
    comm = comm_of("pp2 dp2 tp2", 5)
    assert (comm.group("tp"), comm.index("tp"), comm.degree("tp")) == ((4, 5), 1, 2)
    assert (comm.group(("dp", "pp")), comm.index(("dp", "pp"))) == ((1, 3, 5, 7), 2)
    assert (comm.group("cp"), comm.index("cp"), comm.degree("cp")) == ((5,), 0, 1)
    assert comm.group(()) == (5,)


def test_an_unknown_axis_is_no_axis_of_degree_1():
    with pytest.raises(MeshError, match=r"unknown axis 'ttp'\. Fix: did you mean 'tp'"):
        comm_of("dp2", 0).all_reduce(torch.ones(1), "ttp")


def test_the_transport_must_be_of_this_rank_and_size():
    with pytest.raises(CommError, match=r"rank 1 of mesh dp2 \(2 ranks\) was given the transport of rank 1 of 3"):
        Comm(Mesh.parse("dp2"), 1, MetaTransport(3, 1))


FAULTY = {
    "not divisible": (
        lambda c, x: c.reduce_scatter(x, "dp"),
        "reduce_scatter over dp: dim 0 has 5 entries, not divisible by 2",
    ),
    "sum": (lambda c, x: c.reduce_scatter(x, "dp", sizes=[1, 2]), "has 5 entries, sizes [1, 2] add up to 3"),
    "count": (lambda c, x: c.reduce_scatter(x, "dp", sizes=[5]), "must be 2 lengths, one per member"),
    "negative": (lambda c, x: c.all_to_all(x, "dp", send_sizes=[6, -1]), "none negative"),
    "own size": (lambda c, x: c.all_gather(x, "dp", sizes=[4, 5]), "dim 0 has length 5 here, `sizes` say 4"),
    "dimension": (lambda c, x: c.all_gather(x, "dp", dim=1), "dimension 1 is outside shape [5]"),
    "scalar": (lambda c, x: c.all_gather(x[0], "dp"), "dimension 0 is outside shape []"),
    "root": (lambda c, x: c.broadcast_(x, "dp", root=2), "root 2 is outside axis 'dp' of degree 2"),
    "itself": (lambda c, x: c.send(x, "dp", to=0), "rank 0 is both source and destination of a message along 'dp'"),
    "nobody": (lambda c, x: c.recv(x, "tp", source=0), "rank 0 is both source and destination of a message along 'tp'"),
    "average": (lambda c, x: c.all_reduce(x.long(), "dp", op="avg"), "avg of torch.int64 would not be an integer"),
    "pieces": (lambda c, x: c.scatter([x], x, "dp"), "the root needs 2 pieces of shape [5]"),
    "piece shape": (lambda c, x: c.scatter([x, x[:4]], x, "dp"), "the root needs 2 pieces of shape [5]"),
    "piece dtype": (
        lambda c, x: c.scatter([x.double()] * 2, x, "dp"),
        "pieces are torch.float64, out is torch.float32",
    ),
}


@pytest.mark.parametrize("what", FAULTY)
def test_arguments_that_cannot_be_right_are_told_before_anything_is_sent(what):
    call, told = FAULTY[what]
    with pytest.raises(CommError) as caught:
        call(comm_of("dp2", 0), torch.ones(5))
    assert told in str(caught.value)


def test_checking_is_on_at_first_and_off_inside_unchecked():
    comm = comm_of("dp2", 0)
    with comm.unchecked():
        assert not comm.checked
    assert comm.checked


def test_autograd_sees_nothing_of_plain_operations():
    comm = comm_of("dp2 tp2", 0)
    x = torch.ones(2, requires_grad=True)
    assert not comm.all_reduce(x, "dp").requires_grad
    assert not comm.all_gather(x, "cp").requires_grad
    assert comm.all_reduce_(x, "dp") is x
