"""Modules that read, differentiate and replace their own weights inside a forward train as in one process in every wrapper."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.parallel.test_as_torch import WRAPPERS, Wrap, filled, zero1, zero3
from weft.comm.comm import Comm
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.parallel.zero.sharded_tensor import ShardedTensor
from weft.testing import run_ranks

SIZE = 4


def linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE, dtype=torch.float64)


class Scaled(nn.Module):
    """Calls a module with its own weights times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.5 * param for name, param in self.inner.named_parameters()}
        y: Tensor = functional_call(self.inner, weights, x) + self.inner(x)
        return y


class Hypernetwork(nn.Module):
    """Computes the weights of a linear by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.generate = nn.Linear(SIZE, SIZE * SIZE, dtype=torch.float64)
        self.target = linear()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.generate(x.mean(0)).view(SIZE, SIZE)
        y: Tensor = torch.tanh(functional_call(self.target, {"weight": weight}, x)) + self.target(x)
        return y


class InnerStep(nn.Module):
    """Predicts with the weights after a step of gradient descent, through which it is trained (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.inner.named_parameters())
        loss = functional_call(self.inner, weights, x).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        stepped = {
            name: weight - 0.3 * gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
        return torch.tanh(functional_call(self.inner, stepped, x))


class RecomputedPart(Scaled):
    """Recomputes a part that replaces weights by values of this rank's batch."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def part(self, x: Tensor) -> Tensor:
        weights = {name: x.mean() * param for name, param in self.inner.named_parameters()}
        y: Tensor = functional_call(self.inner, weights, x) + self.inner(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", checkpoint(self.part, x, use_reentrant=self.use_reentrant))


class Recurrent(nn.Module):
    """Replaces the weights of a recurrent layer, which keeps a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(SIZE, SIZE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.5 * param for name, param in self.inner.named_parameters()}
        replaced, _ = functional_call(self.inner, weights, x)
        return cast("Tensor", replaced + self.inner(x)[0])


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "scaled": Scaled,
    "hypernetwork": Hypernetwork,
    "inner step": InnerStep,
    "recomputed": partial(RecomputedPart, use_reentrant=False),
    "recomputed, reentrant": partial(RecomputedPart, use_reentrant=True),
    "recurrent": Recurrent,
}


class Opaque:
    """An output in which wrappers find no tensor."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Net(nn.Module):
    """A linear, and the block that is tested; the output may be hidden in an object."""

    def __init__(self, block: nn.Module, *, is_opaque: bool = False) -> None:
        super().__init__()
        self.is_opaque = is_opaque
        self.blocks = nn.Sequential(linear(), block)
        filled(self)

    def forward(self, x: Tensor) -> Any:
        y = self.blocks(x)
        return Opaque(y) if self.is_opaque else y


def part_of_batch(step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, SIZE, generator=generator, dtype=torch.float64).chunk(2)[part]


def trained(net: Any, parts: list[int]) -> None:
    """Two steps of gradient descent on some halves of the batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(2):
        optimizer.zero_grad()
        for part in parts:
            out = net(part_of_batch(step, part))
            y: Tensor = out.y if isinstance(out, Opaque) else out
            (y.square().mean() / len(parts)).backward()
        optimizer.step()


@pytest.mark.parametrize("is_opaque", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_replaced_weights_have_the_values_of_one_process(
    kind: str, wrap: Wrap, is_opaque: bool
) -> None:
    alone = Net(MAKERS[kind](), is_opaque=is_opaque)
    trained(alone, [0, 1])

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = wrap(Net(MAKERS[kind](), is_opaque=is_opaque), comm)
        trained(net, [comm.rank])
        if isinstance(net, FullyShardedDataParallel):
            assert all(isinstance(each, ShardedTensor) for each in net.module.parameters())
        values: dict[str, Tensor] = net.full_state_dict()
        return values

    for values in run_ranks("dp2", rank):
        torch.testing.assert_close(values, alone.state_dict(), rtol=1e-12, atol=1e-12)


class Failing(nn.Module):
    """A block that raises an error in its forward or its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        if self.fails_in == "forward":
            raise ArithmeticError
        if self.fails_in == "forward, by the user":
            raise KeyboardInterrupt
        if self.fails_in == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: Tensor) -> Tensor:
        raise ArithmeticError


@pytest.mark.parametrize("wrap", [zero1, zero3])
@pytest.mark.parametrize("where", ["forward", "forward, by the user", "backward"])
def test_shards_are_registered_after_an_error(where: str, wrap: Wrap) -> None:
    def rank(comm: Comm) -> dict[str, Tensor]:
        failing = Failing()
        net = wrap(Net(nn.Sequential(failing)), comm)
        before = {name: id(shard) for name, shard in net.named_parameters()}
        failing.fails_in = where
        with pytest.raises((ArithmeticError, KeyboardInterrupt)):
            net(part_of_batch(0, comm.rank)).sum().backward()
        assert {name: id(shard) for name, shard in net.named_parameters()} == before
        assert all(isinstance(value, ShardedTensor) for value in net.state_dict().values())
        failing.fails_in = ""
        net.zero_grad()
        trained(net, [comm.rank])
        values: dict[str, Tensor] = net.full_state_dict()
        return values

    alone = Net(nn.Sequential(Failing()))
    trained(alone, [0, 1])
    for values in run_ranks("dp2", rank):
        torch.testing.assert_close(values, alone.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", [zero1, zero3])
def test_shards_are_saved_within_a_forward_and_a_backward(wrap: Wrap) -> None:
    """By a hook, or the handler of a signal."""

    def rank(comm: Comm) -> None:
        module = Net(Scaled())
        saved: list[dict[str, Any]] = []

        def save(*_: object) -> None:
            saved.append(net.state_dict())
            saved.append(dict(net.named_parameters()))
            saved.append(net.optim_state_dict(optimizer)["state"])

        module.blocks[1].register_forward_hook(save)
        net = wrap(module, comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
        names = {name for name, _ in net.named_parameters()}
        for step in range(2):
            y = net(part_of_batch(step, comm.rank))
            y.register_hook(save)
            y.square().mean().backward()
            optimizer.step()
        for found in (*saved[0::3], *saved[1::3]):
            assert found.keys() == names
            assert all(isinstance(value, ShardedTensor) for value in found.values())
        assert [found.keys() for found in saved[2::3]] == [set(), set(), names, names]

    run_ranks("dp2", rank)


class Watched(nn.Module):
    """A linear that counts how many outputs of such blocks are in memory."""

    outputs: list[weakref.ref[Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.outputs.append(weakref.ref(y))
        self.most_kept = sum(output() is not None for output in self.outputs)
        return y


def test_outputs_of_blocks_are_not_kept_in_a_forward_without_gradients() -> None:
    def rank(comm: Comm) -> int:
        blocks = [Watched() for _ in range(6)]
        for block in blocks:
            block.outputs = blocks[0].__dict__.setdefault("outputs", [])
        net = zero3(nn.Sequential(*blocks), comm)
        with torch.no_grad():
            net(part_of_batch(0, comm.rank))
        return max(block.most_kept for block in blocks)

    assert run_ranks("dp2", rank) == [2, 2]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_two_backwards_of_a_graph_behind_an_opaque_output(wrap: Wrap) -> None:
    """No output says when a backward begins: both are synchronised."""

    def gradients(net: Any, parts: list[int]) -> dict[str, Tensor]:
        for part in parts:
            y = net(part_of_batch(0, part)).y / len(parts)
            y.square().mean().backward(retain_graph=True)
            y.abs().mean().backward()
        found: dict[str, Tensor] = {}
        for name, param in net.named_parameters():
            gradient = param.grad
            is_shard = isinstance(gradient, ShardedTensor)
            found[name.removeprefix("module.")] = gradient.full_tensor() if is_shard else gradient
        return found

    expected: dict[str, Tensor] = {}
    for part in range(2):
        own = gradients(Net(linear(), is_opaque=True), [part])
        expected = {name: own[name] / 2 + expected.get(name, 0) for name in own}

    def rank(comm: Comm) -> dict[str, Tensor]:
        return gradients(wrap(Net(linear(), is_opaque=True), comm), [comm.rank])

    for found in run_ranks("dp2", rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
