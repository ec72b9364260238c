"""Gradient buckets: views, fixed order, one reduction a step, during the last backward."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.matrix import layouts
from tests.matrix.layouts import LR, Case, batches, own_micro_batches
from tests.one_device import micro_batches
from tests.parallel.test_tp import Log
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.models import FAMILIES
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.testing import run_ranks
from weft.train.step import TrainStep


def make_step(case: Case, comm: Comm) -> TrainStep:
    return layouts.make_step(case, comm, clip=1.0)


def gradient_addresses(step: TrainStep) -> dict[str, int]:
    """Where each gradient lies in memory."""
    return {name: param.grad.data_ptr() for name, param in step.model.params.items()}


def bucket_order(step: TrainStep) -> tuple[tuple[str, ...], ...]:
    """The parameters of each bucket, in the order of the backward."""
    return tuple(tuple(group.params) for group in reversed(step.grads.groups))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_are_reduced_once_a_step_however_many_micro_batches(microbatches: int) -> None:
    case = Case("dp2", family="gpt2", microbatches=microbatches)

    def rank(comm: Comm) -> tuple[int, int, int]:
        step = make_step(case, comm)
        counter = Counter()
        comm.observers = (counter,)
        step(own_micro_batches(case, comm), lr=LR)
        reduced = counter.traffic["dp", "all_reduce"]
        return reduced.operations, len(step.grads.groups), reduced.payload_bytes

    for operations, num_buckets, payload in run_ranks("dp2", rank):
        num_params = sum(p.numel() for p in _params(case))
        assert num_buckets > 3, "small buckets, so that there is something to overlap"
        assert operations == num_buckets + 1, "every bucket once, and the count of target tokens"
        assert payload == 8 * num_params + 8


def _params(case: Case) -> list[nn.Parameter]:
    blocks = FAMILIES[case.family].blocks(case.config)
    ties = FAMILIES[case.family].ties(case.config)
    named = {
        f"{name}.{path}": p
        for name, block in blocks.items()
        for path, p in block.named_parameters()
    }
    return [param for name, param in named.items() if name not in ties]


def test_buckets_are_reduced_while_the_last_backward_still_runs() -> None:
    case = Case("dp2", microbatches=2)

    def rank(comm: Comm) -> list[str]:
        step = make_step(case, comm)
        log = Log()
        first = step.model.params["embed.tok.weight"]
        first.register_post_accumulate_grad_hook(
            lambda _: log.lines.append("first layer's gradient")
        )
        comm.observers = (log,)
        step(own_micro_batches(case, comm), lr=LR)
        return log.lines

    for lines in run_ranks("dp2", rank):
        marks = [place for place, line in enumerate(lines) if line == "first layer's gradient"]
        reductions = [place for place, line in enumerate(lines) if line == "start all_reduce"]
        starts = reductions[1:]
        assert len(marks) == 2
        assert starts[0] > marks[0], "nothing is reduced before the last micro-batch"
        assert sum(start < marks[1] for start in starts) >= len(starts) - 2, (
            "only the last buckets wait for the end"
        )


def test_gradients_stay_views_into_their_buckets_and_bucket_order_does_not_change() -> None:
    case = Case("dp3", microbatches=2)

    def rank(comm: Comm) -> tuple[tuple[str, ...], ...]:
        step = make_step(case, comm)
        places = gradient_addresses(step)
        order = bucket_order(step)
        for batch in batches(case):
            step(micro_batches(batch, case.plan, comm.rank), lr=LR)
        assert gradient_addresses(step) == places
        assert bucket_order(step) == order
        expected = tuple(tuple(group.params) for group in reversed(step.grads.groups))
        assert order == expected
        return order

    orders = set(run_ranks("dp3", rank))
    assert len(orders) == 1
    (order,) = orders
    assert order[0][0] == "head.proj.weight", "the gradient that comes first is reduced first"


def test_ranks_of_one_data_group_stay_bit_equal() -> None:
    case = Case("dp3", family="gpt2", microbatches=2)

    def rank(comm: Comm) -> dict[str, Tensor]:
        step = make_step(case, comm)
        for batch in batches(case):
            step(micro_batches(batch, case.plan, comm.rank), lr=LR)
        values = {}
        for name, param in step.model.params.items():
            values[name] = param.detach().clone()
        return values

    first, *others = run_ranks("dp3", rank)
    for other in others:
        for name in first:
            assert torch.equal(first[name], other[name])


class Net(nn.Module):
    """A module with a buffer, a frozen parameter and one that gets no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 5).double()
        self.second = nn.Linear(5, 5).double()
        self.unused = nn.Linear(5, 5).double()
        self.frozen = nn.Parameter(torch.ones(5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("shift", torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + self.shift)
        return self.second(hidden) * self.frozen


@pytest.mark.parametrize("set_to_none", [True, False])
def test_distributed_data_parallel_trains_as_one_process_on_the_whole_batch(
    set_to_none: bool,
) -> None:
    torch.manual_seed(9)
    steps = torch.randn(3, 2, 12, 5, dtype=torch.float64)  # step, accumulation, sample, feature
    alone = Net(0)
    optimizer = torch.optim.SGD(
        [p for p in alone.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    for step in steps:
        optimizer.zero_grad()
        loss = sum(alone(x).square().mean() for x in step)
        loss.backward()
        optimizer.step()

    nets = [
        Net(seed) for seed in range(3)
    ]  # made here: the ranks are threads and share torch's random generator

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = DistributedDataParallel(nets[comm.rank], comm, bucket_bytes=128)
        mine = torch.optim.SGD(
            [p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )
        for step in steps:
            mine.zero_grad(set_to_none=set_to_none)
            first, second = (x.chunk(3)[comm.rank] for x in step)
            with net.no_sync():
                net(first).square().mean().backward()
            net(second).square().mean().backward()
            net.finish_gradient_synchronization()
            mine.step()
        return copy.deepcopy(net.full_state_dict())

    for state in run_ranks("dp3", rank):
        for name, want in alone.state_dict().items():
            torch.testing.assert_close(state[name], want, rtol=1e-12, atol=1e-14)


class Branches(nn.Module):
    """Ranks may use different branches; `unused` has no part in any forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.trunk, self.left, self.right, self.unused = (
            nn.Linear(3, 3).double() for _ in range(4)
        )

    def forward(self, x: Tensor, branch: str) -> Tensor:
        y: Tensor = getattr(self, branch)(self.trunk(x))
        return y


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_parameters_that_no_rank_used_have_no_gradient_and_do_not_decay(bucket_bytes: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 4, 3, dtype=torch.float64, generator=generator)
    alone = Branches()
    branches = ("left", "trunk", "trunk")
    loss = sum(alone(x[rank], branches[rank]).sum() / 3 for rank in range(3))
    loss.backward()
    nets = [Branches() for _ in range(3)]

    def rank(comm: Comm) -> None:
        net = DistributedDataParallel(nets[comm.rank], comm, bucket_bytes=bucket_bytes)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):  # the second step finds what the first left in the buckets
            optimizer.zero_grad()
            own_loss = net(x[comm.rank], branches[comm.rank]).sum()
            own_loss.backward()
            net.finish_gradient_synchronization()
            for name, param in alone.named_parameters():
                gradient = dict(net.module.named_parameters())[name].grad
                if param.grad is None:
                    assert gradient is None, name
                else:
                    torch.testing.assert_close(gradient, param.grad, rtol=1e-12, atol=1e-14)
        optimizer.step()
        assert torch.equal(net.module.unused.weight, alone.unused.weight)
        assert not torch.equal(net.module.left.weight, alone.left.weight)

    run_ranks("dp3", rank)


def test_a_deleted_model_leaves_no_parameters_behind() -> None:
    """Before, torch's hooks kept every model of a process in memory."""

    def rank(comm: Comm) -> None:
        net = DistributedDataParallel(nn.Linear(2, 2), comm)
        net(torch.ones(1, 2)).sum().backward()
        net.finish_gradient_synchronization()
        weight = weakref.ref(net.module.weight)
        del net
        gc.collect()
        assert weight() is None

    run_ranks("dp2", rank)


def test_a_gradient_of_a_module_whose_wrapper_was_deleted_is_an_error() -> None:
    def rank(comm: Comm) -> None:
        module = nn.Linear(2, 2)
        DistributedDataParallel(module, comm)(torch.ones(1, 2))
        gc.collect()
        with pytest.raises(RuntimeError, match="its wrapper was deleted"):
            module(torch.ones(1, 2)).sum().backward()

    run_ranks("dp2", rank)


Loop = Callable[[torch.optim.Optimizer, Callable[[], None]], None]
"""One step of a training loop: optimizer, what computes and synchronises gradients."""


def zero_first(optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> None:
    optimizer.zero_grad()
    backward()
    optimizer.step()


def zero_last(optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> None:
    backward()
    optimizer.step()
    optimizer.zero_grad()


def zero_in_place(optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward()
    optimizer.step()


LOOPS = [zero_first, zero_last, zero_in_place]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_parameter_that_no_rank_used_does_not_decay_in_any_loop(loop: Loop) -> None:
    plain = Net(0)

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = DistributedDataParallel(copy.deepcopy(plain), comm)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)

        def backward() -> None:
            loss = net(torch.ones(2, 5, dtype=torch.float64)).sum()
            loss.backward()
            net.finish_gradient_synchronization()

        for _ in range(3):
            loop(optimizer, backward)
        assert net.module.unused.weight.grad is None
        return net.full_state_dict()

    trained = {"first.weight", "first.bias", "second.weight", "second.bias"}
    for state in run_ranks("dp2", rank):
        changed = {
            name
            for name, value in plain.state_dict().items()
            if not torch.equal(state[name], value)
        }
        assert changed == trained


def test_a_parameter_that_is_no_longer_used_decays_only_where_its_gradient_is_zeros() -> None:
    """As in one process, and under torch's DistributedDataParallel with find_unused_parameters."""

    def rank(comm: Comm) -> list[bool]:
        return [stays(loop, comm) for loop in LOOPS]

    def stays(loop: Loop, comm: Comm) -> bool:
        net = DistributedDataParallel(Net(0), comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5)

        def used() -> None:
            x = net(torch.ones(2, 5, dtype=torch.float64))
            loss = net.module.unused(x).sum()
            loss.backward()
            net.finish_gradient_synchronization()

        def not_used() -> None:
            net(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            net.finish_gradient_synchronization()

        loop(optimizer, used)
        before = net.module.unused.weight.detach().clone()
        loop(optimizer, not_used)
        return torch.equal(net.module.unused.weight, before)

    for found in run_ranks("dp2", rank):
        assert found == [True, True, False]


@pytest.mark.parametrize("wrap", ["ddp", "replicas", "fsdp"])
def test_a_full_state_dict_keeps_its_values_while_the_script_trains_on(wrap: str) -> None:
    def rank(comm: Comm) -> bool:
        plain = nn.Linear(2, 2)
        net = {
            "ddp": lambda: DistributedDataParallel(plain, comm),
            "replicas": lambda: weft.DataParallel(plain, ["cpu"]),
            "fsdp": lambda: weft.FullyShardedDataParallel(plain, comm),
        }[wrap]()
        best = net.full_state_dict()
        kept = copy.deepcopy(best)
        net(torch.ones(1, 2)).sum().backward()
        net.finish_gradient_synchronization()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        assert not torch.equal(net.full_state_dict()["weight"], kept["weight"])
        return all(torch.equal(best[name], value) for name, value in kept.items())

    assert run_ranks("dp2", rank) == [True, True]
