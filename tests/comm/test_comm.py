"""`Comm`: groups by axis, invalid arguments, what it does without a transport."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.transport import MetaTransport
from weft.core.mesh import Mesh
from weft.errors import CommError, MeshError


def comm_of(text, rank):
    mesh = Mesh.parse(text)
    transport = MetaTransport(mesh.size, rank, device="cpu")
    return Comm(mesh, rank, transport)


def test_groups_are_those_of_the_mesh():
    comm = comm_of("pp2 dp2 tp2", 5)
    assert comm.group("tp") == (4, 5)
    assert comm.index("tp") == 1
    assert comm.degree("tp") == 2
    assert comm.group(("dp", "pp")) == (1, 3, 5, 7)
    assert comm.index(("dp", "pp")) == 2
    assert comm.group("cp") == (5,)
    assert comm.index("cp") == 0
    assert comm.degree("cp") == 1
    assert comm.group(()) == (5,)


def test_an_unknown_axis_is_an_error_and_not_an_axis_of_degree_1():
    with pytest.raises(MeshError, match=r"unknown axis 'ttp'\. Fix: did you mean 'tp'"):
        comm_of("dp2", 0).all_reduce(torch.ones(1), "ttp")


def test_the_transport_must_be_of_this_rank_and_size():
    mesh = Mesh.parse("dp2")
    with pytest.raises(
        CommError, match=r"rank 1 of mesh dp2 \(2 ranks\) was given the transport of rank 1 of 3"
    ):
        Comm(mesh, 1, MetaTransport(3, 1))


@dataclass(frozen=True)
class InvalidCall:
    """A call on rank 0 of dp2 with x = ones(5), and a part of its error message."""

    call: Callable
    message: str


INVALID_CALLS = {
    "length not divisible": InvalidCall(
        lambda comm, x: comm.reduce_scatter(x, "dp"),
        "reduce_scatter over dp: dim 0 has 5 entries, not divisible by 2",
    ),
    "sum of sizes": InvalidCall(
        lambda comm, x: comm.reduce_scatter(x, "dp", sizes=[1, 2]),
        "has 5 entries, sizes [1, 2] add up to 3",
    ),
    "number of sizes": InvalidCall(
        lambda comm, x: comm.reduce_scatter(x, "dp", sizes=[5]), "must be 2 lengths, one per member"
    ),
    "negative size": InvalidCall(
        lambda comm, x: comm.all_to_all(x, "dp", send_sizes=[6, -1]), "none negative"
    ),
    "own size": InvalidCall(
        lambda comm, x: comm.all_gather(x, "dp", sizes=[4, 5]),
        "dim 0 has length 5 here, `sizes` say 4",
    ),
    "dimension": InvalidCall(
        lambda comm, x: comm.all_gather(x, "dp", dim=1), "dimension 1 is outside shape [5]"
    ),
    "scalar": InvalidCall(
        lambda comm, x: comm.all_gather(x[0], "dp"), "dimension 0 is outside shape []"
    ),
    "in place, two dimensions": InvalidCall(
        lambda comm, x: comm.all_gather_(x.view(1, 5), "dp"),
        "all_gather in place over dp needs one contiguous dimension that 2 divides, got shape [1, 5]",
    ),
    "in place, not divisible": InvalidCall(
        lambda comm, x: comm.reduce_scatter_(x, "dp"),
        "reduce_scatter in place over dp needs one contiguous dimension that 2 divides, got shape [5]",
    ),
    "root": InvalidCall(
        lambda comm, x: comm.broadcast_(x, "dp", root=2), "root 2 is outside axis 'dp' of degree 2"
    ),
    "message to itself": InvalidCall(
        lambda comm, x: comm.send(x, "dp", to=0),
        "rank 0 is both source and destination of a message along 'dp'",
    ),
    "message along an axis of degree 1": InvalidCall(
        lambda comm, x: comm.recv(x, "tp", source=0),
        "rank 0 is both source and destination of a message along 'tp'",
    ),
    "average of integers": InvalidCall(
        lambda comm, x: comm.all_reduce(x.long(), "dp", op="avg"),
        "avg of torch.int64 would not be an integer",
    ),
    "number of pieces": InvalidCall(
        lambda comm, x: comm.scatter([x], x, "dp"), "the root needs 2 pieces of shape [5]"
    ),
    "shape of a piece": InvalidCall(
        lambda comm, x: comm.scatter([x, x[:4]], x, "dp"), "the root needs 2 pieces of shape [5]"
    ),
    "dtype of a piece": InvalidCall(
        lambda comm, x: comm.scatter([x.double()] * 2, x, "dp"),
        "pieces are torch.float64, out is torch.float32",
    ),
}


@pytest.mark.parametrize("name", INVALID_CALLS)
def test_invalid_arguments_raise_before_anything_is_sent(name):
    invalid = INVALID_CALLS[name]
    with pytest.raises(CommError) as caught:
        invalid.call(comm_of("dp2", 0), torch.ones(5))
    assert invalid.message in str(caught.value)


def test_checking_is_on_at_first_and_off_inside_unchecked():
    comm = comm_of("dp2", 0)
    with comm.unchecked():
        assert not comm.checked
    assert comm.checked


def test_autograd_does_not_record_plain_operations():
    comm = comm_of("dp2 tp2", 0)
    x = torch.ones(2, requires_grad=True)
    assert not comm.all_reduce(x, "dp").requires_grad
    assert not comm.all_gather(x, "cp").requires_grad
    assert comm.all_reduce_(x, "dp") is x
