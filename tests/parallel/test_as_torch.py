"""What scripts written for torch's DDP and FSDP2 do with a module: weft's wrappers train as one process does."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.parallel.zero.sharded_tensor import ShardedTensor
from weft.testing import run_ranks

RTOL = 1e-12
DATA = ("dp", "cp")
Wrap = Callable[[nn.Module, Comm], Any]
Action = Callable[["Script"], None]


def filled(module: nn.Module) -> nn.Module:
    """In double precision, with values that do not depend on torch's generator."""
    module.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.rand(param.shape, generator=generator, dtype=param.dtype) - 0.3)
    return module


class Net(nn.Module):
    """Matrices, vectors, a scalar, and uneven shapes; dicts go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_outputs = 4
        self.first = nn.Linear(3, 5, dtype=torch.float64)
        self.norm = nn.LayerNorm(5, dtype=torch.float64)
        self.second = nn.Linear(5, 4, dtype=torch.float64)
        self.gain = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        filled(self)

    def predict(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self(batch)["y"]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = torch.tanh(self.norm(self.first(batch["x"])))
        return {"y": self.second(hidden) * self.gain}


class Script:
    """A script's module, wrapped or plain, and this rank's batches."""

    def __init__(
        self, wrap: Wrap | None, comm: Comm | None, make: Callable[[], nn.Module] = Net
    ) -> None:
        self.plain = make()
        self.wrap = wrap
        self.comm = comm
        self.net: Any = self.plain

    def wrapped(self, module: nn.Module | None = None) -> Any:
        """Wrap the module now; in one process it stays as it is."""
        module = self.plain if module is None else module
        net = module if self.wrap is None or self.comm is None else self.wrap(module, self.comm)
        if module is self.plain:
            self.net = net
        return net

    def batch(self, seed: int) -> dict[str, Tensor]:
        """This rank's half of the samples."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        if self.comm is not None:
            x = x.chunk(self.comm.degree(DATA))[self.comm.index(DATA)]
        return {"x": x}

    def loss(self, seed: int) -> Tensor:
        """The mean over the samples of a rank."""
        loss: Tensor = self.net(self.batch(seed))["y"].square().mean()
        return loss

    def train(self, optimizer: Optimizer, *, steps: int = 3, first: int = 0) -> None:
        """Some plain steps."""
        for step in range(first, first + steps):
            optimizer.zero_grad()
            self.loss(step).backward()
            optimizer.step()

    def values(self) -> dict[str, Tensor]:
        """The whole state of the module."""
        state = self.net.full_state_dict() if self.comm is not None else self.net.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}


def ddp(module: nn.Module, comm: Comm) -> Any:
    return DistributedDataParallel(module, comm, bucket_bytes=64)


def zero1(module: nn.Module, comm: Comm) -> Any:
    return FullyShardedDataParallel(module, comm, zero=1)


def zero2(module: nn.Module, comm: Comm) -> Any:
    return FullyShardedDataParallel(module, comm, zero=2)


def zero3(module: nn.Module, comm: Comm) -> Any:
    return FullyShardedDataParallel(module, comm)


WRAPPERS = [ddp, zero1, zero2, zero3]


# optimizers of whole parameters, written as papers have them


class Lamb(Optimizer):
    """Steps of the norm of the parameter (You et al. 2020)."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p
                ratio = p.norm() / (update.norm() + 1e-6)
                p.add_(update * ratio, alpha=-group["lr"])


class Orthogonal(Optimizer):
    """Muon in exact arithmetic: steps of the orthogonal factor of the momentum (Jordan 2024)."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.1)
                left, _, right = torch.linalg.svd(momentum, full_matrices=False)
                p.add_(left @ right, alpha=-group["lr"])


class OldStyle(Optimizer):
    """Writes `p.data` and sums squares by hand, as scripts of 2018 do."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = 1.0 / (1.0 + p.grad.data.pow(2).sum().sqrt().item())
                    p.data.add_(p.grad.data, alpha=-0.1 * scale)


# everyday actions


def plain_loop(script: Script) -> None:
    net = script.wrapped()
    script.train(torch.optim.AdamW(net.parameters(), lr=0.05))


def clipping(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        script.loss(step).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()


def several_backwards(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        one, other = script.loss(step), script.loss(step + 50)
        one.backward()
        other.backward()
        script.loss(step + 100).backward()
        optimizer.step()


def accumulation(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            if script.comm is None:
                script.loss(step + 10 * micro).backward()
                continue
            with net.no_sync():
                script.loss(step + 10 * micro).backward()
        script.loss(step + 20).backward()
        optimizer.step()


def accumulation_by_attribute(script: Script) -> None:
    """As nanoGPT has it: DDP's attribute says which backwards reduce, FSDP2's method in the last step."""
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            if script.comm is not None and step < 2:
                net.require_backward_grad_sync = micro == 2
            elif script.comm is not None:
                net.set_requires_gradient_sync(micro == 2)
            script.loss(step + 10 * micro).backward()
            if script.comm is not None:
                assert bool(net._unsynchronized) == (micro < 2), (
                    "reduced by the last backward alone"
                )
        optimizer.step()


def attributes_of_the_module(script: Script) -> None:
    """A model's config, layers and methods, by the wrapped module as under FSDP2, by `.module` under DDP's."""
    net = script.wrapped()
    model = net.module if isinstance(net, DistributedDataParallel) else net
    model.second.bias.requires_grad_(model.num_outputs != 4)
    script.train(torch.optim.SGD(net.parameters(), lr=0.5))
    with torch.no_grad():
        expected = net(script.batch(9))["y"]
    torch.testing.assert_close(model.predict(script.batch(9)), expected, rtol=0, atol=0)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = net.no_such_name


def discarding_what_was_accumulated(script: Script) -> None:
    """Zeroed before and after the next forward, to None and in place, also beside a synchronised gradient."""
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        if step == 3:
            script.loss(step + 30).backward()
        with nullcontext() if script.comm is None else net.no_sync():
            script.loss(step + 7).backward()
        if step % 2:
            optimizer.zero_grad(set_to_none=step == 3)
        loss = script.loss(step)
        if step % 2 == 0:
            optimizer.zero_grad(set_to_none=step == 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def discarding(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        script.loss(step + 7).backward()
        optimizer.zero_grad(set_to_none=step == 0)
        script.loss(step).backward()
        optimizer.step()
        net.zero_grad()


def optimizer_before_wrapping(script: Script) -> None:
    optimizer = torch.optim.AdamW(script.plain.parameters(), lr=0.05)
    script.wrapped()
    script.train(optimizer)


def groups_by_ndim(script: Script) -> None:
    net = script.wrapped()
    decayed = [p for p in net.parameters() if p.ndim >= 2]
    rest = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    assert len(decayed) == 2
    script.train(torch.optim.AdamW(groups, lr=0.05))


def lamb(script: Script) -> None:
    script.train(Lamb(script.wrapped().parameters()))


def old_style(script: Script) -> None:
    script.train(OldStyle(script.wrapped().parameters()))


def muon(script: Script) -> None:
    net = script.wrapped()
    matrices = [p for p in net.parameters() if p.ndim == 2]
    script.train(torch.optim.Muon(matrices, lr=0.05))
    script.train(Orthogonal(matrices))


def adafactor(script: Script) -> None:
    script.train(torch.optim.Adafactor(script.wrapped().parameters(), lr=0.05))


def fused(script: Script) -> None:
    script.train(torch.optim.AdamW(script.wrapped().parameters(), lr=0.05, fused=True))


def foreach(script: Script) -> None:
    script.train(torch.optim.AdamW(script.wrapped().parameters(), lr=0.05, foreach=True))


def lbfgs(script: Script) -> None:
    evaluate_several_times(
        script, torch.optim.LBFGS(script.wrapped().parameters(), lr=0.1, max_iter=3)
    )


def evaluate_several_times(script: Script, optimizer: Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = script.loss(0)
        loss.backward()
        if script.comm is None:
            return loss.detach()
        return script.comm.all_reduce(loss.detach(), "dp") / 2

    for _ in range(2):
        optimizer.step(closure)


def freezing_later(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    script.train(optimizer)
    script.plain.first.requires_grad_(False)
    script.train(optimizer, first=3)
    script.plain.first.requires_grad_(True)
    script.plain.gain.requires_grad_(False)
    script.train(optimizer, first=6)


def unfreezing_later(script: Script) -> None:
    script.plain.first.requires_grad_(False)
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    script.train(optimizer)
    script.plain.first.requires_grad_(True)
    script.train(optimizer, first=3)


def casting(script: Script) -> None:
    net = script.wrapped()
    net.float()
    net.double()
    script.train(torch.optim.AdamW(net.parameters(), lr=0.05))


def replacing_data(script: Script) -> None:
    net = script.wrapped()
    for param in net.parameters():
        param.data = param.data * 0.5
    script.train(torch.optim.AdamW(net.parameters(), lr=0.05))


def changing_values(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    script.train(optimizer)
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(0.9)
            nn.init.constant_(param, 0.1) if param.ndim == 1 else param.clamp_(-0.2, 0.2)
    script.loss(5).detach()
    script.train(optimizer, first=3)


def a_deep_copy(script: Script) -> None:
    net = script.wrapped()
    script.train(torch.optim.SGD(net.parameters(), lr=0.5))
    copied = copy.deepcopy(net)
    script.train(torch.optim.SGD(net.parameters(), lr=9.0))  # must not change the copy
    script.net = copied
    script.train(torch.optim.SGD(copied.parameters(), lr=0.5), first=3)


def averaging(script: Script) -> None:
    net = script.wrapped()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        script.train(optimizer, steps=1, first=step)
        averaged.update_parameters(net)
    script.net = averaged.module


def saving(script: Script) -> None:
    """Adamax computes with a state before it computes with that and a gradient."""
    net = script.wrapped()
    optimizer = torch.optim.Adamax(net.parameters(), lr=0.05)
    script.train(optimizer)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    script.train(optimizer, first=9)
    saved = torch.load(file)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    script.train(optimizer, first=3)


def a_penalty(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        penalty = sum(param.square().sum() + param.norm() for param in net.parameters())
        (script.loss(step) + 0.1 * penalty).backward()
        optimizer.step()


def an_input_gradient(script: Script) -> None:
    """A gradient penalty: a gradient with regard to the input, which is differentiated again."""
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        batch = script.batch(step)
        batch["x"].requires_grad_()
        output = net(batch)["y"].square().sum(1)
        (gradient,) = torch.autograd.grad(output.sum(), batch["x"], create_graph=True)
        (output.mean() + gradient.square().sum(1).mean()).backward()
        optimizer.step()


def called_twice(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        (script.loss(step) + 2 * script.loss(step + 30)).backward()
        optimizer.step()


def two_losses(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        y = net(script.batch(step))["y"]
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
        optimizer.step()


def hooks_of_parameters(script: Script) -> None:
    """The optimizer steps in hooks, on gradients that another hook has doubled."""
    net = script.wrapped()
    optimizers = {param: torch.optim.SGD([param], lr=0.2) for param in net.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        param.grad = None

    for param in net.parameters():
        param.register_hook(lambda gradient: gradient * 2)
        param.register_post_accumulate_grad_hook(update)
    for step in range(3):
        script.loss(step).backward()


def a_teacher_and_two_optimizers(script: Script) -> None:
    """A generator, a discriminator and a frozen teacher, each wrapped."""
    net = script.wrapped()
    other = script.wrapped(
        nn.Sequential(nn.Linear(4, 3, dtype=torch.float64), nn.Tanh()).requires_grad_()
    )
    with torch.no_grad():
        for param in other.parameters():
            param.copy_(torch.full(tuple(param.shape), 0.1, dtype=torch.float64))
    teacher = script.wrapped(Net().requires_grad_(False))
    generator = torch.optim.SGD(net.parameters(), lr=0.3)
    critic = torch.optim.SGD(other.parameters(), lr=0.3)
    for step in range(3):
        critic.zero_grad()
        fake = net(script.batch(step))["y"]
        real = teacher(script.batch(step))["y"]
        (other(fake.detach()).mean() - other(real + 1).mean()).backward()
        critic.step()
        generator.zero_grad()
        (-other(net(script.batch(step))["y"]).square().mean()).backward()
        generator.step()
    script.train(generator, first=3)


class Recomputed(Net):
    """Blocks that are computed again in the backward, one of them in a backward of its own inside."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"].clone().requires_grad_()
        hidden = checkpoint(self.first, x, use_reentrant=True)
        hidden = torch.tanh(checkpoint(self.norm, hidden, use_reentrant=False))
        return {"y": self.second(hidden) * self.gain}


def checkpointing(script: Script) -> None:
    net = script.wrapped(Recomputed())
    script.net = net
    script.train(torch.optim.SGD(net.parameters(), lr=0.5))


class Recurrent(Net):
    """Layers of which torch holds the weights in lists and weak references, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = filled(nn.LSTM(3, 3, batch_first=True))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        sequence, _ = self.rnn(batch["x"].unsqueeze(1).expand(-1, 3, -1))
        return super().forward({"x": sequence.mean(1)})


def recurrent_layers(script: Script) -> None:
    """Frozen in part later: the block computes gradients of its inputs with what has none itself."""
    script.net = net = script.wrapped(Recurrent())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    script.train(optimizer)
    rnn = net.rnn if script.comm is None or hasattr(net, "rnn") else net.module.rnn
    for name, param in rnn.named_parameters():
        param.requires_grad_("weight_hh" not in name)
    script.train(optimizer, first=3)
    script.net = net = copy.deepcopy(net)
    script.train(torch.optim.SGD(net.parameters(), lr=0.5), first=6)


class Stopped(nn.Module):
    """A block that reads its weights detached, has a frozen one, one that is never used, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.frozen = nn.Parameter(torch.empty(3, 3), requires_grad=False)
        self.never = nn.Parameter(torch.empty(2, 3))
        self.filter = nn.Parameter(torch.empty(2, dtype=torch.complex128))
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
        filled(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x) @ self.weight.detach() @ self.frozen + x.detach() @ self.weight
        return torch.fft.irfft(torch.fft.rfft(hidden * self.scale) * self.filter, n=3)


class Twice(Net):
    """The first block runs again after the others, recomputed by reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stopped(), filled(nn.Linear(3, 3))])
        self.blocks.append(self.blocks[0])

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"].clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return super().forward({"x": x})


class TwiceStored(Twice):
    """The same without checkpoints."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return Net.forward(self, {"x": x})


def reentrant_checkpoints_of_one_block(script: Script) -> None:
    script.net = net = script.wrapped(Twice())
    script.train(torch.optim.SGD(net.parameters(), lr=0.5))


def a_retained_graph_and_other_weights(script: Script) -> None:
    """Two backwards of one graph, which has saved a buffer; then an evaluation under other weights, and back."""
    script.net = net = script.wrapped(TwiceStored())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05, eps=0.1)
    for step in range(2):
        optimizer.zero_grad()
        y = net(script.batch(step))["y"]
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
        optimizer.step()
        kept = [param.detach().clone() for param in net.parameters()]
        for param in net.parameters():
            param.data.mul_(0.5)
        with torch.no_grad():
            net(script.batch(step))
        for param, value in zip(net.parameters(), kept, strict=True):
            param.data.copy_(value)


def penalties(script: Script) -> None:
    """A gradient penalty with a backward of its own; norms of parameters, also of one that is not used."""
    script.net = net = script.wrapped(TwiceStored())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        batch = script.batch(step)
        batch["x"].requires_grad_()
        (gradient,) = torch.autograd.grad(net(batch)["y"].sum(), batch["x"], create_graph=True)
        gradient.square().sum(1).mean().backward()
        penalty = sum(param.abs().square().sum() for param in net.parameters())
        (script.loss(step) + 0.1 * penalty).backward()
        optimizer.step()


class Broken(torch.autograd.Function):
    """Raises an error in the backward, as one that runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError


class SometimesBroken(Net):
    """Its backward fails between two blocks."""

    is_broken = False

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = torch.tanh(self.norm(self.first(batch["x"])))
        hidden = Broken.apply(hidden) if self.is_broken else hidden
        return {"y": self.second(hidden) * self.gain}


def going_on_after_an_error(script: Script) -> None:
    """A batch is left out, whose backward raised an error when some gradients had arrived."""
    plain = SometimesBroken()
    script.net = net = script.wrapped(plain)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        plain.is_broken = step % 2 == 1
        try:
            script.loss(step).backward()
        except ArithmeticError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)


def casting_later(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    script.train(optimizer)
    net.float()
    net.double()
    script.train(optimizer, first=3)


def as_a_vector(script: Script) -> None:
    net = script.wrapped()
    vector = torch.nn.utils.parameters_to_vector(net.parameters())
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(vector * 0.9, net.parameters())
    script.train(torch.optim.SGD(net.parameters(), lr=0.5))


def detached_gradients(script: Script) -> None:
    """Zeroed as scripts of 2017 do; a backward creates a graph of them, and the values move then."""
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        for param in net.parameters():
            if param.grad is not None:
                param.grad.detach_().zero_()
        script.loss(step).backward()
        optimizer.step()
    script.loss(9).backward(create_graph=True)
    for param in net.parameters():
        param.data = param.data.clone()  # also where this rank has no entries
    script.train(optimizer, first=3)


def gradients_set_by_hand(script: Script) -> None:
    net = script.wrapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for param in net.parameters():
        param.grad = torch.full(tuple(param.shape), 0.1, dtype=torch.float64)
    optimizer.step()
    script.train(optimizer)


ACTIONS: list[Action] = [
    plain_loop,
    clipping,
    several_backwards,
    accumulation,
    accumulation_by_attribute,
    attributes_of_the_module,
    discarding,
    discarding_what_was_accumulated,
    optimizer_before_wrapping,
    groups_by_ndim,
    lamb,
    old_style,
    muon,
    adafactor,
    fused,
    foreach,
    lbfgs,
    freezing_later,
    unfreezing_later,
    casting,
    replacing_data,
    changing_values,
    a_deep_copy,
    averaging,
    saving,
    a_penalty,
    an_input_gradient,
    called_twice,
    two_losses,
    hooks_of_parameters,
    a_teacher_and_two_optimizers,
    checkpointing,
    gradients_set_by_hand,
]
RARE_ACTIONS: list[Action] = [
    recurrent_layers,
    reentrant_checkpoints_of_one_block,
    a_retained_graph_and_other_weights,
    penalties,
    going_on_after_an_error,
    casting_later,
    as_a_vector,
    detached_gradients,
]
CASES = [*itertools.product(ACTIONS, WRAPPERS), *itertools.product(RARE_ACTIONS, [ddp, zero3])]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize(("act", "wrap"), CASES)
def test_an_everyday_action_has_the_values_of_one_process(act: Action, wrap: Wrap) -> None:
    if act is hooks_of_parameters and wrap is ddp:
        pytest.skip("hooks see gradients of this rank alone, as under torch's")
    alone = Script(None, None)
    act(alone)
    expected = alone.values()

    def rank(comm: Comm) -> dict[str, Tensor]:
        script = Script(wrap, comm)
        act(script)
        return script.values()

    rtol = 1e-6 if act in (casting, casting_later) else RTOL
    for values in run_ranks("dp2", rank):
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                values[name],
                value,
                rtol=rtol,
                atol=rtol,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("make", [Lamb, Orthogonal, torch.optim.Adafactor])
def test_a_sharded_optimizer_of_whole_parameters_has_the_values_of_one_process(
    make: Callable[..., Optimizer],
) -> None:
    def matrices(net: nn.Module) -> list[nn.Parameter]:
        return [param for param in net.parameters() if param.ndim == 2]

    alone = Script(None, None)
    alone.train(make(matrices(alone.plain), lr=0.05))

    def rank(comm: Comm) -> dict[str, Tensor]:
        script = Script(ddp, comm)
        net = script.wrapped()
        script.train(ShardedOptimizer(matrices(net), make, comm, lr=0.05))
        return script.values()

    for values in run_ranks("dp2", rank):
        for name, value in alone.values().items():
            torch.testing.assert_close(
                values[name],
                value,
                rtol=RTOL,
                atol=RTOL,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def test_a_sharded_optimizer_evaluates_a_closure_as_often_as_it_needs() -> None:
    alone = Script(None, None)
    lbfgs(alone)

    def rank(comm: Comm) -> dict[str, Tensor]:
        script = Script(ddp, comm)
        params = script.wrapped().parameters()
        optimizer = ShardedOptimizer(params, torch.optim.LBFGS, comm, lr=0.1, max_iter=3)
        evaluate_several_times(script, optimizer)
        return script.values()

    for values in run_ranks("dp2", rank):
        torch.testing.assert_close(values, alone.values(), rtol=RTOL, atol=RTOL)


def test_gradients_that_were_kept_after_an_error_are_rejected() -> None:
    def rank(comm: Comm) -> None:
        plain = SometimesBroken()
        net = DistributedDataParallel(plain, comm)
        batch = {"x": torch.ones(2, 3, dtype=torch.float64)}
        plain.is_broken = True
        with pytest.raises(ArithmeticError):
            net(batch)["y"].sum().backward()
        plain.is_broken = False
        net(batch)["y"].sum().backward()

    with pytest.raises(PlanError, match=r"raised an error, .* of gain, .* Fix: zero_grad"):
        run_ranks("dp2", rank)


@pytest.mark.slow  # imports the compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_wrapper_is_compiled_around_its_hooks() -> None:
    """Rank threads: a compiler that followed the hooks would wait for a rank that waits for the compiler."""

    def rank(comm: Comm) -> dict[str, Tensor]:
        script = Script(zero3, comm)
        net = script.wrapped()
        script.net = torch.compile(net, backend="eager")
        script.train(torch.optim.SGD(net.parameters(), lr=0.5), steps=1)
        script.net = net
        return script.values()

    alone = Script(None, None)
    alone.train(torch.optim.SGD(alone.plain.parameters(), lr=0.5), steps=1)
    for values in run_ranks("dp2", rank):
        torch.testing.assert_close(values, alone.values(), rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_loss_scaler_skips_the_same_steps_on_every_rank(wrap: Wrap) -> None:
    """An overflow on one rank alone."""

    def rank(comm: Comm) -> list[float]:
        net = wrap(nn.Linear(3, 4), comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        scales: list[float] = []
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((2, 3), float("inf") if step == 1 and comm.rank == 1 else 1.0)
            scaler.scale(net(x).mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert all(value.isfinite().all() for value in net.full_state_dict().values())
        return scales

    assert run_ranks("dp2", rank) == [[1024.0, 512.0, 512.0]] * 2


def test_a_shard_has_the_shape_norms_and_values_of_the_whole_parameter() -> None:
    whole = torch.linspace(-1, 2, 35, dtype=torch.float64).view(5, 7)

    def rank(comm: Comm) -> None:
        linear = nn.Linear(7, 5, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(whole)
        (shard,) = zero3(linear, comm).parameters()
        assert isinstance(shard, ShardedTensor)
        assert isinstance(shard, nn.Parameter)
        assert shard.shape == whole.shape
        assert shard.local.numel() < whole.numel()
        for function in (
            torch.sum,
            torch.mean,
            torch.max,
            torch.linalg.norm,
            lambda x: x.norm(3),
            lambda x: x @ x.T,
        ):
            torch.testing.assert_close(
                function(shard).detach(), function(whole), rtol=1e-14, atol=0
            )
        plain = torch.ones(3, dtype=torch.float64)
        norms = torch._foreach_norm([shard, plain, shard * 2])
        expected = torch._foreach_norm([whole, plain, whole * 2])
        torch.testing.assert_close([norm.detach() for norm in norms], expected, rtol=1e-14, atol=0)
        with torch.no_grad():
            shard[0, 0] = 5.0
            shard.add_(whole).mul_(whole[:1])
        changed = whole.clone()
        changed[0, 0] = 5.0
        changed.add_(whole).mul_(whole[:1])
        torch.testing.assert_close(shard.full_tensor().detach(), changed, rtol=0, atol=0)
        with torch.no_grad():
            view = shard.view(-1)
            shard.mul_(2)
            view[1:3].add_(view[5:7])
            flat = changed.view(-1)
            changed.mul_(2)
            flat[1:3].add_(flat[5:7])
        torch.testing.assert_close(shard.full_tensor().detach(), changed, rtol=0, atol=0)

    run_ranks("dp2", rank)


def test_two_axes_shard_inside_and_replicate_outside() -> None:
    alone = Script(None, None)
    several_backwards(alone)

    def hybrid(module: nn.Module, comm: Comm) -> Any:
        return FullyShardedDataParallel(module, comm, axis="cp", replicate="dp")

    def rank(comm: Comm) -> tuple[dict[str, Tensor], int]:
        script = Script(hybrid, comm)
        several_backwards(script)
        held = sum(shard.local.numel() for shard in script.net.parameters())
        return script.values(), held

    results = run_ranks("dp2 cp2", rank)
    num_entries = sum(param.numel() for param in alone.plain.parameters())
    assert sum(held for _, held in results) == 2 * num_entries, "each shard is on two ranks"
    for values, _ in results:
        for name, value in alone.values().items():
            torch.testing.assert_close(
                values[name],
                value,
                rtol=RTOL,
                atol=RTOL,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_mean_that_float16_holds_is_right_where_the_sum_is_not(wrap: Wrap) -> None:
    """Gradients of 40,000 on two ranks: their sum is infinite in float16."""

    def rank(comm: Comm) -> list[Tensor]:
        net = wrap(nn.Linear(4, 3).half(), comm)
        for _ in range(2):
            net.zero_grad()
            net(torch.full((1, 4), 40_000.0, dtype=torch.float16)).sum().backward()
        gradients: list[Tensor] = []
        for param in net.parameters():
            assert param.grad is not None
            is_shard = isinstance(param.grad, ShardedTensor)
            gradients.append(param.grad.full_tensor() if is_shard else param.grad)
        return gradients

    for weight, bias in run_ranks("dp2", rank):
        assert weight.eq(40_000.0).all()
        assert bias.eq(1.0).all()
