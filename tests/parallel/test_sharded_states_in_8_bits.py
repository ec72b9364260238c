"""`weft.ShardedOptimizer(state_bits=8)`: updates of one process with rounded states, bytes held, state dicts on other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.parallel.zero.sharded_tensor import local_of
from weft.prove.plain_codes import rounded_to_8_bits
from weft.testing import run_ranks

BLOCK = 10
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3}),
    "Adam fused": (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
}


class Net(nn.Module):
    """Rows of one block and a half, a matrix below 16 blocks, biases, and one matrix in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(7, 30).double()
        self.first = nn.Linear(30, 17).double()
        self.second = nn.Linear(17, 15).double()
        self.last = nn.Linear(15, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(self.embed(x)))))
        y: Tensor = self.last(h)
        return y


IN_8_BITS = ("first.weight", "second.weight")


def groups(net: Net) -> list[dict[str, Any]]:
    embed = [*net.embed.parameters()]
    others = [param for name, param in net.named_parameters() if not name.startswith("embed")]
    return [{"params": others}, {"params": embed, "lr": 3e-2, "state_bits": None}]


def train(
    net: Net,
    optimizer: torch.optim.Optimizer,
    *,
    first: int = 0,
    after_step: Callable[[], object] = int,
) -> None:
    for step in range(first, first + 4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 7, dtype=torch.float64, generator=generator)
        net(x).square().mean().backward()
        optimizer.step()
        after_step()


def train_one_process(net: Net, optimizer: torch.optim.Optimizer, *, first: int = 0) -> None:
    """The plain optimizer, whose states are rounded after each step by the arithmetic of proofs."""

    def round_states() -> None:
        for name, param in net.named_parameters():
            for key, value in optimizer.state[param].items():
                if name in IN_8_BITS and isinstance(value, Tensor) and value.dim() == 2:
                    value.copy_(rounded_to_8_bits(key, value, BLOCK))

    train(net, optimizer, first=first, after_step=round_states)


def values(net: Net) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mesh", ["dp1", "dp3", "dp4"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_those_of_one_process_with_rounded_states(name: str, mesh: str) -> None:
    kind, options = OPTIMIZERS[name]
    plain = Net()
    exact = Net()
    train_one_process(plain, kind(groups(plain), **options))
    train(exact, kind(groups(exact), **options))
    assert not torch.allclose(plain.first.weight, exact.first.weight, rtol=1e-6)
    nets = [Net() for _ in range(4)]

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = nets[comm.rank]
        given = {"state_bits": 8, "state_block": BLOCK, **options}
        train(net, ShardedOptimizer(groups(net), kind, comm, **given))
        return values(net)

    for moved in run_ranks(mesh, rank):
        assert_near(moved, values(plain))


class SumOfGradients(torch.optim.Optimizer):
    """A user's class: its "sum", unlike Adagrad's, has a sign."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                    param.sub_(state["sum"], alpha=group["lr"])


def test_states_of_other_classes_keep_their_sign() -> None:
    plain = Net()
    theirs = SumOfGradients(groups(plain), lr=1e-2)

    def round_states() -> None:
        for name in IN_8_BITS:
            (value,) = theirs.state[plain.get_parameter(name)].values()
            value.copy_(rounded_to_8_bits("a signed one", value, BLOCK))

    train(plain, theirs, after_step=round_states)

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = Net()
        given = {"state_bits": 8, "state_block": BLOCK, "lr": 1e-2}
        train(net, ShardedOptimizer(groups(net), SumOfGradients, comm, **given))
        return values(net)

    for moved in run_ranks("dp2", rank):
        assert_near(moved, values(plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dicts_load_on_another_number_of_ranks(name: str) -> None:
    """The steps after it equal those of one process that was not stopped; own shards load, too."""
    kind, options = OPTIMIZERS[name]
    plain = Net()
    theirs = kind(groups(plain), **options)
    train_one_process(plain, theirs)
    model = copy.deepcopy(plain.state_dict())
    train_one_process(plain, theirs, first=4)
    given = {"state_bits": 8, "state_block": BLOCK, **options}

    def save(comm: Comm) -> dict[str, Any]:
        net = Net()
        optimizer = ShardedOptimizer(groups(net), kind, comm, **given)
        train(net, optimizer)
        return copy.deepcopy(optimizer.full_state_dict())

    saved = run_ranks("dp3", save)[1]

    def load(comm: Comm) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        net, other = Net(), Net()
        optimizer = ShardedOptimizer(groups(net), kind, comm, **given)
        net.load_state_dict(model)
        optimizer.load_full_state_dict(copy.deepcopy(saved))
        again = copy.deepcopy(optimizer.full_state_dict())
        own = ShardedOptimizer(groups(other), kind, comm, **given)
        other.load_state_dict(model)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, by in ((net, optimizer), (other, own)):
            train(each, by, first=4)
        return again, values(net), values(other)

    for again, moved, moved_too in run_ranks("dp2", load):
        for number, state in saved["state"].items():
            for key, value in state.items():
                assert value is None or torch.equal(again["state"][number][key], value)
        assert_near(moved, values(plain))
        assert_near(moved_too, values(plain))


def test_a_state_of_a_large_matrix_is_a_byte_an_entry_between_steps() -> None:
    def rank(comm: Comm) -> tuple[int, int]:
        net = nn.Linear(512, 64)
        optimizer = ShardedOptimizer(
            net.parameters(), torch.optim.AdamW, comm, lr=1e-3, state_bits=8
        )
        net(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        held = list(optimizer.inner.state[optimizer.shard_of(net.weight)].values())
        coded = optimizer._coded._codes[optimizer.shard_of(net.weight)].values()
        num_bytes = sum(each.codes.nbytes + each.absmax.nbytes for each in coded)
        state = optimizer.shard_state(net.weight)
        assert state["exp_avg"].shape == (64, 512)
        assert optimizer.shard_state(net.weight).keys() == {"step", "exp_avg", "exp_avg_sq"}
        return num_bytes, sum(local_of(value).numel() for value in held if value.dim())

    for num_bytes, num_values in run_ranks("dp2", rank):
        assert num_values == 0
        own = 512 * 64 // 2
        assert 2 * own <= num_bytes <= 2 * (own + 4 * own // 256 + 4 * 256)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"state_bits": 4}, r"state_bits: states have 8 bits or .* \(got 4; need 8 or None\)"),
        ({"state_bits": 8, "state_block": 1}, r"state_block: .* \(got 1; need 2 or more\)"),
    ],
)
def test_other_bits_are_rejected(options: dict[str, Any], error: str) -> None:
    def rank(comm: Comm) -> None:
        ShardedOptimizer(nn.Linear(4, 4).parameters(), torch.optim.AdamW, comm, **options)

    with pytest.raises(PlanError, match=error):
        run_ranks("dp2", rank)


def test_states_that_a_wrapper_loads_replace_the_codes() -> None:
    kind, options = OPTIMIZERS["AdamW"]

    def rank(comm: Comm) -> tuple[dict[str, Any], dict[str, Any], int]:
        net = DistributedDataParallel(Net(), comm)
        optimizer = ShardedOptimizer(
            groups(net.module), kind, comm, state_bits=8, state_block=BLOCK, **options
        )
        train(net.module, optimizer)
        saved = copy.deepcopy(net.full_optim_state_dict(optimizer))
        train(net.module, optimizer, first=4)
        net.load_optim_state_dict(optimizer, saved)
        shard = optimizer.shard_of(net.module.first.weight)
        return saved, net.full_optim_state_dict(optimizer), len(optimizer.inner.state[shard])

    for saved, loaded, num_values in run_ranks("dp2", rank):
        assert num_values == 1, "of a coded parameter the count of steps alone is a value"
        for name, state in saved["state"].items():
            for key, value in state.items():
                assert torch.equal(loaded["state"][name][key], value), (name, key)
