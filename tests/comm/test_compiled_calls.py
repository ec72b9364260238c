"""Collectives in compiled code: the results, the calls and their order are those of code that is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from weft.comm import ops
from weft.comm.comm import Comm
from weft.comm.observe import Operation
from weft.models.common import compiler
from weft.models.common.compiler import compile_function
from weft.testing import run_ranks

pytestmark = [  # of the compiler's own code
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
Function = Callable[[Tensor, Comm], Tensor]


class Calls:
    """The calls of a rank, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def started(self, op: Operation) -> None:
        self.seen.append(f"{op.axis} {op.payload_bytes} {op.signature}")

    def finished(self, op: Operation) -> None:
        pass


def region(x: Tensor, comm: Comm) -> Tensor:
    entered = ops.copy_to_region(x, comm, "tp")
    return ops.reduce_from_region(entered.sin(), comm, "tp")


def sequence_region(x: Tensor, comm: Comm) -> Tensor:
    entered = ops.all_gather(x, comm, "tp", dim=1)
    return ops.reduce_scatter(entered.cos() * entered, comm, "tp", dim=1)


def uneven(x: Tensor, comm: Comm) -> Tensor:
    whole = ops.reduce_from_region(x, comm, "tp")
    own = ops.scatter_to_region(whole, comm, "tp", dim=0, sizes=(3, 1))
    return ops.all_gather(own.exp(), comm, "tp", dim=0, sizes=(3, 1))


def exchanged(x: Tensor, comm: Comm) -> Tensor:
    heads = ops.all_to_all(x, comm, "tp", dim=1, join_dim=0)
    return ops.all_to_all(heads.sin(), comm, "tp", dim=0, join_dim=1)


def two_branches(x: Tensor, comm: Comm) -> Tensor:
    """Equal calls that do not depend on each other, and one whose result nothing needs."""
    entered = ops.copy_to_region(x, comm, "tp")
    left = ops.reduce_from_region(entered.sin(), comm, "tp")
    right = ops.reduce_from_region(entered.sin(), comm, "tp")
    comm.all_reduce(x.detach(), "tp", op="max")
    return left * right


def over_two_axes(x: Tensor, comm: Comm) -> Tensor:
    entered = ops.copy_to_region(x, comm, ("dp", "tp"))
    return ops.reduce_from_region(entered.sin(), comm, ("dp", "tp"))


def behind_a_break(x: Tensor, comm: Comm) -> Tensor:
    """A tensor, and a view of it with another gradient, both leave the first of two graphs."""
    y = x * 3
    entered = ops.copy_to_region(y, comm, "tp")
    flat = entered.flatten()
    torch._dynamo.graph_break()
    return ops.reduce_from_region(entered.sin() + flat.view_as(y) * y, comm, "tp")


def results(
    function: Function, comm: Comm, *, compiles: bool
) -> tuple[list[Tensor], Sequence[str]]:
    """Output, gradient of the input, and calls."""
    calls = Calls()
    comm.observers = (calls,)
    x = torch.arange(8.0, dtype=torch.float64).view(4, 2) / 7 + comm.rank
    x.requires_grad_()
    if compiles:
        function = compile_function(function, x.device)
    y = function(x, comm)
    y.backward(torch.full_like(y, 1 + comm.rank))
    assert x.grad is not None
    return [y.detach(), x.grad], calls.seen


@pytest.mark.parametrize(
    ("function", "mesh"),
    [
        (region, "tp2"),
        (sequence_region, "tp2"),
        (uneven, "tp2"),
        (exchanged, "tp2"),
        (two_branches, "tp2"),
        (over_two_axes, "dp2 tp2"),
        (behind_a_break, "tp2"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_compiled_code_makes_the_calls_of_code_as_written(
    function: Function, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")

    def rank(comm: Comm) -> tuple[object, ...]:
        return results(function, comm, compiles=False), results(function, comm, compiles=True)

    for (plain, plain_calls), (compiled, compiled_calls) in run_ranks(mesh, rank):
        torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
        assert compiled_calls == plain_calls
        assert plain_calls


@pytest.mark.slow
def test_kernels_of_the_compiler_keep_the_order_of_calls() -> None:
    torch._dynamo.reset()

    def rank(comm: Comm) -> tuple[object, ...]:
        plain = results(two_branches, comm, compiles=False)
        return plain, results(two_branches, comm, compiles=True)

    for (plain, plain_calls), (compiled, compiled_calls) in run_ranks("tp2", rank):
        torch.testing.assert_close(compiled, plain)
        assert compiled_calls == plain_calls
