"""Conformance suite for transports: each rank checks the result of every collective, since inputs are functions of the rank.

def conforms(comm):
    for name, check in CHECKS.items():
        for what, got, expected in check(comm):
            assert torch.equal(got.cpu(), expected), f"{name}: {what}"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.core.dimension import all_axes
from weft.core.mesh import Axis
from weft.testing import movement_checks, reduction_checks
from weft.testing.comparison import ResultCheck, groups_of, is_true, make_input, reduce


class _StartedCollective(NamedTuple):
    """A collective under way, and its expected result."""

    what: str
    work: Work
    expected: Tensor


def overlapping(comm: Comm) -> Iterator[ResultCheck]:
    """Works of all groups in flight, started in another order on every other rank, waited for in
    reverse.
    """
    x = make_input(comm.rank, 5).to(comm.device)
    groups = list(groups_of(comm))
    if comm.rank % 2 == 0:
        groups.reverse()
    started: list[_StartedCollective] = []
    for group in groups:
        axis = group.axis
        inputs = group.inputs(5)
        total = comm.start_all_reduce(x, axis)
        largest = comm.start_all_reduce(x, axis, op="max")
        gathered = comm.start_all_gather(x, axis)
        started.append(_StartedCollective(f"sum {axis}", total, reduce(inputs, "sum")))
        started.append(_StartedCollective(f"max {axis}", largest, reduce(inputs, "max")))
        started.append(_StartedCollective(f"gather {axis}", gathered, torch.cat(inputs)))
    for what, work, expected in reversed(started):
        yield ResultCheck(what, work.wait(), expected)
        yield ResultCheck(f"{what} again", work.wait(), expected)


def single_member(comm: Comm) -> Iterator[ResultCheck]:
    """Along an axis of size 1 a collective returns a copy of its input."""
    axis: Axis = ()
    for name in all_axes():
        if comm.degree(name) == 1:
            axis = name
            break
    expected = make_input(comm.rank, 2, 2)
    x = expected.to(comm.device)
    works = {
        "all_reduce": comm.start_all_reduce(x, axis),
        "all_gather": comm.start_all_gather(x, axis, dim=1),
        "reduce_scatter": comm.start_reduce_scatter(x, axis),
        "all_to_all": comm.start_all_to_all(x, axis),
    }
    for what, work in works.items():
        got = work.wait()
        yield ResultCheck(what, got, expected)
        yield is_true(f"{what} is in memory of its own", got is not x)
    out = torch.zeros(2, 2, device=comm.device)
    got = comm.all_reduce_(x, axis)
    yield ResultCheck("all_reduce_", got, expected)
    got = comm.scatter([x], out, axis)
    yield ResultCheck("scatter", got, expected)
    comm.barrier(axis)


Check = Callable[[Comm], Iterator[ResultCheck]]

CHECKS: dict[str, Check] = {
    "all_reduces": reduction_checks.all_reduces,
    "all_reduces_of_odd_tensors": reduction_checks.all_reduces_of_odd_tensors,
    "all_gathers": movement_checks.all_gathers,
    "reduce_scatters": reduction_checks.reduce_scatters,
    "in_place": reduction_checks.in_place,
    "all_to_alls": movement_checks.all_to_alls,
    "one_to_many": movement_checks.one_to_many,
    "messages": movement_checks.messages,
    "overlapping": overlapping,
    "single_member": single_member,
}


def conform(comm: Comm, *names: str) -> int:
    """Run the checks of these names (without names: all) and return the number of comparisons.

    Raises:
        AssertionError: at the first difference.
    """
    num_compared = 0
    for name in names or CHECKS:
        check = CHECKS[name]
        for comparison in check(comm):
            _assert_equal(name, comparison)
            num_compared += 1
        for group in groups_of(comm):
            comm.barrier(group.axis)
    return num_compared


def _assert_equal(name: str, comparison: ResultCheck) -> None:
    what, got, expected = comparison
    got = got.detach().cpu()
    has_same_shape = got.shape == expected.shape
    has_same_dtype = got.dtype == expected.dtype
    is_like_expected = has_same_shape and has_same_dtype
    if not is_like_expected or not torch.equal(got, expected):
        raise AssertionError(f"{name}: {what}: got {got}, expected {expected}")
