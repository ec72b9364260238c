"""Misuse of wrapped modules: equal to one process, or an error; never other values in silence."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.testing import run_ranks

Wrap = Callable[[nn.Module, Comm], Any]


def ddp(module: nn.Module, comm: Comm) -> Any:
    return DistributedDataParallel(module, comm)


def zero2(module: nn.Module, comm: Comm) -> Any:
    return FullyShardedDataParallel(module, comm, zero=2)


def zero3(module: nn.Module, comm: Comm) -> Any:
    return FullyShardedDataParallel(module, comm)


def net_of(*sizes: int) -> nn.Sequential:
    linears = [nn.Linear(size, size) for size in sizes]
    return nn.Sequential(*linears)


def train_step(net: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    net.finish_gradient_synchronization()
    optimizer.step()


def rejected(rank: Callable[[Comm], object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        run_ranks("dp2", rank)


@pytest.mark.parametrize("inner", [ddp, zero3])
@pytest.mark.parametrize("outer", [ddp, zero3])
def test_a_parameter_is_in_one_wrapper(inner: Wrap, outer: Wrap) -> None:
    def in_a_wrapper(comm: Comm) -> None:
        outer(inner(net_of(3), comm), comm)

    def twice(comm: Comm) -> None:
        plain = net_of(3)
        wrappers = [inner(plain, comm)]
        wrappers.append(outer(plain, comm))

    def shared(comm: Comm) -> None:
        one, other = net_of(3), net_of(3)
        other[0].weight = one[0].weight
        wrappers = [inner(one, comm)]
        wrappers.append(outer(other, comm))

    for rank in (in_a_wrapper, twice, shared):
        rejected(rank, "0.weight is a parameter of a wrapped module already")


def test_the_module_inside_is_not_called_with_values_of_before_the_step() -> None:
    def rank(comm: Comm) -> None:
        net = zero2(net_of(3), comm)
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net.module(torch.ones(2, 3))

    rejected(rank, r"call the wrapped module: net\(x\)")


@pytest.mark.parametrize("wrap", [ddp, zero3])
def test_a_wrapped_module_is_not_pickled(wrap: Wrap) -> None:
    def saved(comm: Comm) -> None:
        torch.save(wrap(net_of(3), comm), io.BytesIO())

    rejected(saved, "cannot be pickled")


def test_a_freed_parameter_is_nan_and_writing_it_is_an_error() -> None:
    def read(comm: Comm) -> None:
        net = zero3(net_of(3), comm)
        weight = net.module[0].weight
        assert weight.shape == (3, 3)
        assert weight.sum().isnan()
        assert torch.from_numpy(weight.detach().numpy()).isnan().all()
        net(torch.ones(2, 3)).sum().backward()
        net.finish_gradient_synchronization()
        for param in net.parameters():
            if param.numel() > 0:
                assert param.grad is not None
                assert torch.equal(param.grad, torch.full_like(param, 2.0))

    run_ranks("dp2", read)

    def written(comm: Comm) -> None:
        net = zero3(net_of(3), comm)
        nn.init.zeros_(net.module[0].weight)
        net(torch.ones(2, 3))

    rejected(written, "0.weight: was written while its memory is freed")


def fill_data(weight: nn.Parameter) -> None:
    weight.data.fill_(1.0)


def give_data(weight: nn.Parameter) -> None:
    weight.data = torch.ones(3, 3)


@pytest.mark.parametrize("write", [nn.init.zeros_, fill_data, give_data])
def test_a_freed_parameter_that_was_written_is_an_error_of_state_dicts(
    write: Callable[[nn.Parameter], object],
) -> None:
    """They would have the former values."""

    def written(comm: Comm) -> None:
        net = zero3(net_of(3), comm)
        write(net.module[0].weight)
        with pytest.raises(PlanError, match="was written while its memory is freed"):
            net.state_dict()
        net.full_state_dict()

    rejected(written, "0.weight: was written while its memory is freed")


def test_memory_that_a_script_gives_a_freed_parameter_is_an_error_of_the_forward() -> None:
    def given(comm: Comm) -> None:
        net = zero3(net_of(3), comm)
        give_data(net.module[0].weight)
        net(torch.ones(2, 3))

    rejected(given, "0.weight: was written while its memory is freed")


@pytest.mark.parametrize("wrap", [zero2, zero3])
def test_a_parameter_that_was_added_or_replaced_after_wrapping_is_rejected(wrap: Wrap) -> None:
    def added(comm: Comm) -> None:
        net = wrap(net_of(3), comm)
        net.module.append(nn.Linear(3, 3))
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def replaced(comm: Comm) -> None:
        net = wrap(net_of(3, 3), comm)
        net.module[1].weight = nn.Parameter(torch.ones(3, 3))
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1))

    for rank in (added, replaced):
        rejected(rank, "1.weight was added after the module was wrapped")


def test_shards_are_not_sharded_again() -> None:
    def rank(comm: Comm) -> None:
        net = zero2(net_of(3), comm)
        ShardedOptimizer(net.parameters(), torch.optim.SGD, comm, lr=0.1)

    rejected(rank, "these parameters are shards of FullyShardedDataParallel")
