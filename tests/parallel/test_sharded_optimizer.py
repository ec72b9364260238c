"""`weft.ShardedOptimizer`: updates as the plain torch optimizer, holds its shard of the states, saves and loads full ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.errors import DataError
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.parallel.zero.sharded_tensor import local_of
from weft.testing import run_ranks


@dataclass(frozen=True)
class OptimizerCase:
    """A class of torch and the options that it gets."""

    kind: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]


OPTIMIZERS = {
    "AdamW": OptimizerCase(torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3}),
    "Adam fused amsgrad": OptimizerCase(
        torch.optim.Adam, {"lr": 1e-2, "fused": True, "amsgrad": True}
    ),
    "SGD with momentum": OptimizerCase(
        torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}
    ),
    "SGD": OptimizerCase(torch.optim.SGD, {"lr": 1e-1}),
    "NAdam": OptimizerCase(torch.optim.NAdam, {"lr": 1e-2}),
    "Adagrad": OptimizerCase(torch.optim.Adagrad, {"lr": 1e-1}),
    "RMSprop": OptimizerCase(torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    "Rprop": OptimizerCase(torch.optim.Rprop, {"lr": 1e-2}),
}


class Net(nn.Module):
    """Uneven shapes, a scalar, float32 among float64, a frozen parameter, one without a gradient, a
    tied one.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5).double()
        self.second = nn.Linear(5, 3).double()
        self.gain = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.single = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) * self.gain) * self.single
        frozen = h @ self.first.weight * self.frozen
        y: Tensor = self.second(h) + frozen
        return y


def groups(net: Net) -> list[dict[str, Any]]:
    weights = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() <= 1]
    return [{"params": others}, {"params": weights, "lr": 3e-2}]


def train(net: Net, optimizer: torch.optim.Optimizer, *, first: int = 0, steps: int = 4) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
        net(x).square().mean().backward()
        optimizer.step()
        schedule.step()


def values(net: Net) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in net.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_those_of_the_plain_optimizer(name: str) -> None:
    kind = OPTIMIZERS[name].kind
    options = OPTIMIZERS[name].options
    plain = Net()
    nets = [Net() for _ in range(3)]
    theirs = kind(groups(plain), **options)
    train(plain, theirs)

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = nets[comm.rank]
        ours = ShardedOptimizer(groups(net), kind, comm, **options)
        train(net, ours)
        return values(net)

    for moved in run_ranks("dp3", rank):
        for key, want in values(plain).items():
            torch.testing.assert_close(
                moved[key], want, rtol=1e-12 if want.dtype == torch.float64 else 1e-6, atol=1e-12
            )


def test_states_are_held_for_the_shard_of_the_rank_alone() -> None:
    nets = [nn.Linear(31, 33).double() for _ in range(4)]

    def rank(comm: Comm) -> int:
        net = nets[comm.rank]
        optimizer = ShardedOptimizer(net.parameters(), torch.optim.AdamW, comm, lr=1e-3)
        loss = net(torch.ones(2, 31, dtype=torch.float64)).sum()
        loss.backward()
        optimizer.step()
        return sum(
            local_of(x).numel()
            for state in optimizer.inner.state.values()
            for x in state.values()
            if x.dim()
        )

    held = run_ranks("dp4", rank)
    assert sum(held) == 2 * (31 * 33 + 33)
    assert max(held) - min(held) <= 2 * 4, "the last shard is shorter by the padding"


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "SGD", "NAdam"])
def test_full_states_load_into_the_plain_optimizer_and_back_on_another_number_of_ranks(
    name: str,
) -> None:
    kind = OPTIMIZERS[name].kind
    options = OPTIMIZERS[name].options
    plain = Net()
    nets = [Net() for _ in range(3)]
    theirs = kind(groups(plain), **options)
    train(plain, theirs)
    saved = copy.deepcopy((plain.state_dict(), theirs.state_dict()))
    train(plain, theirs, first=4)

    def rank(comm: Comm) -> tuple[dict[str, Any], dict[str, Tensor]]:
        net = nets[comm.rank]
        net.load_state_dict(saved[0])
        optimizer = ShardedOptimizer(groups(net), kind, comm, **options)
        optimizer.load_full_state_dict(copy.deepcopy(saved[1]))
        again = optimizer.full_state_dict()
        train(net, optimizer, first=4)
        return again, values(net)

    for mesh in ("dp2", "dp3"):
        for again, moved in run_ranks(mesh, rank):
            assert again["param_groups"] == saved[1]["param_groups"]
            assert again["state"].keys() == saved[1]["state"].keys()
            for number, state in saved[1]["state"].items():
                assert all(
                    torch.equal(again["state"][number][key], value)
                    for key, value in state.items()
                    if value is not None
                )
            for key, want in values(plain).items():
                torch.testing.assert_close(
                    moved[key],
                    want,
                    rtol=1e-12 if want.dtype == torch.float64 else 1e-6,
                    atol=1e-12,
                )


def test_a_rank_saves_and_loads_its_own_shard() -> None:
    def rank(comm: Comm) -> bool:
        net = nets[comm.rank]
        other = copy.deepcopy(nets[comm.rank])
        optimizer = ShardedOptimizer(net.parameters(), torch.optim.AdamW, comm, lr=1e-2)
        train(net, optimizer)
        fresh = ShardedOptimizer(other.parameters(), torch.optim.AdamW, comm, lr=5.0)
        other.load_state_dict(net.state_dict())
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, by in ((net, optimizer), (other, fresh)):
            train(each, by, first=4)
        left = values(net)
        right = values(other)
        return all(torch.equal(value, right[name]) for name, value in left.items())

    nets = [Net() for _ in range(2)]
    assert all(run_ranks("dp2", rank))


def test_named_parameters_and_closures_are_taken_as_torch_takes_them() -> None:
    def rank(comm: Comm) -> tuple[float, list[str]]:
        net = nets[comm.rank]
        optimizer = ShardedOptimizer(net.named_parameters(), torch.optim.SGD, comm, lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(1, 3, dtype=torch.float64)).square().sum()
            loss.backward()
            return loss.detach()

        first = optimizer.step(closure)
        change = first - optimizer.step(closure)
        return float(change), optimizer.param_groups[0]["param_names"]

    nets = [Net() for _ in range(2)]
    for fallen, known in run_ranks("dp2", rank):
        assert fallen > 0
        assert known[0] == "gain"


def test_states_of_other_parameters_are_rejected() -> None:
    def rank(comm: Comm) -> None:
        params = nn.Linear(4, 4).parameters()
        optimizer = ShardedOptimizer(params, torch.optim.AdamW, comm)
        optimizer.load_full_state_dict(
            torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()
        )

    with pytest.raises(DataError, match="another number of parameters"):
        run_ranks("dp2", rank)
