"""Optimizers of plain scripts on tensor-parallel layers: equal to one process, or one line."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items as create_write_items
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

import weft
from tests.parallel.test_as_torch import Lamb, OldStyle, Orthogonal
from weft.comm.comm import Comm
from weft.core.shard import Stacked
from weft.errors import PlanError
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.testing import run_ranks

X, Y = torch.linspace(-1, 1, 80, dtype=torch.float64).sin().view(2, 8, 5)
AXES = {"up.weight": ("ffn", None), "up.bias": ("ffn",), "down.weight": (None, "ffn")}
STEPS = 3

Make = Callable[[Iterable[Any]], Optimizer]
Wrap = Callable[[nn.Module, Comm], nn.Module]


@torch.no_grad()
def set_values(module: nn.Module) -> None:
    """Values without torch's generator, others for each parameter."""
    for number, param in enumerate(module.parameters()):
        entries = torch.arange(param.numel(), dtype=torch.float64)
        param.copy_((entries * (number + 1.3)).cos().view_as(param))


class Mlp(nn.Module):
    """Of 7 hidden features, of which two ranks have parts of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7, dtype=torch.float64)
        self.norm = nn.LayerNorm(5, dtype=torch.float64)
        self.down = nn.Linear(7, 5, dtype=torch.float64)
        set_values(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y


class MeanSquares(Optimizer):
    """Steps of one length for each weight: of the mean of its squares, and a decay by its largest norm."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("mean", torch.zeros((), dtype=p.dtype)).lerp_(
                    (p.grad**2).mean(), 0.3
                )
                p.addcmul_(p.grad, 1 / (state["mean"].sqrt() + 1e-8), value=-0.01)
                p.mul_(1 - 0.01 * p.data.view(-1).norm() - 0.01 * torch.sum(p.abs()) / 100)


class NormOfMomentum(Optimizer):
    """Steps of one length for each weight, along the momentum."""

    def __init__(self, params: Iterable[Any], *, foreach: bool) -> None:
        super().__init__(params, {"foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                self.state[p].setdefault("momentum", torch.zeros(p.shape, dtype=p.dtype))
            momenta = [self.state[p]["momentum"] for p in params]
            gradients = [p.grad for p in params]
            if group["foreach"]:
                torch._foreach_lerp_(momenta, gradients, 0.2)
            else:
                for momentum, gradient in zip(momenta, gradients, strict=True):
                    momentum.mul_(0.8).add_(gradient, alpha=0.2)
            for p, momentum in zip(params, momenta, strict=True):
                p.add_(momentum / (momentum.norm() + 1e-9), alpha=-0.05)


class RowMeans(Optimizer):
    """Adafactor's statistics, as means of squares over each dim."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 2:
                    squares = p.grad.pow(2)
                    p.add_(p.grad / (squares.mean(dim=-1, keepdim=True).sqrt() + 1e-8), alpha=-0.01)
                    p.add_(p.grad / (squares.mean(dim=0).sqrt() + 1e-8), alpha=-0.01)


def adamw(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, foreach=True)


def whole(module: nn.Module, comm: Comm) -> nn.Module:
    return module


def train(net: nn.Module, optimizer: Optimizer, batch: slice = slice(None)) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(net(X[batch]), Y[batch]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def own_batch(comm: Comm) -> slice:
    size = 8 // comm.degree("dp")
    return slice(comm.index("dp") * size, (comm.index("dp") + 1) * size)


WRAPS: list[tuple[str, Wrap]] = [
    ("tp2", whole),
    ("dp2 tp2", DistributedDataParallel),
    ("dp2 tp2", FullyShardedDataParallel),
]


@pytest.mark.parametrize("make", [adamw, Lamb, OldStyle, MeanSquares])
@pytest.mark.parametrize(("mesh", "wrap"), WRAPS)
def test_norms_and_sums_are_those_of_whole_layers(make: Make, mesh: str, wrap: Wrap) -> None:
    expected = Mlp()
    train(expected, make(expected.parameters()))

    def rank(comm: Comm) -> None:
        net = wrap(weft.parallelize(Mlp(), comm, axes=AXES), comm)
        train(net, make(net.parameters()), own_batch(comm))
        torch.testing.assert_close(net(X), expected(X), rtol=1e-10, atol=1e-12)

    run_ranks(mesh, rank)


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.ndim == 2]


def torch_muon(params: Iterable[Any]) -> Optimizer:
    return torch.optim.Muon(params, lr=0.05)


@pytest.mark.parametrize(
    "make", [adamw, Lamb, torch_muon, torch.optim.Adafactor, RowMeans, MeanSquares]
)
@pytest.mark.parametrize(("mesh", "wrap"), WRAPS[:2])
def test_the_optimizer_in_a_sharded_one_sees_whole_layers(
    make: Make, mesh: str, wrap: Wrap
) -> None:
    """Muon orthogonalises whole matrices in bfloat16, whose norm is added in float32."""
    expected = Mlp()
    params = matrices(expected) if make is torch_muon else expected.parameters()
    train(expected, make(params))

    def rank(comm: Comm) -> None:
        net = wrap(weft.parallelize(Mlp(), comm, axes=AXES), comm)
        params = matrices(net) if make is torch_muon else net.parameters()
        optimizer = ShardedOptimizer(params, make, comm)
        train(net, optimizer, own_batch(comm))
        torch.testing.assert_close(net(X), expected(X), rtol=1e-10, atol=1e-12)
        before = optimizer.full_state_dict()
        optimizer.load_full_state_dict(before)
        for key, value in optimizer.full_state_dict()["state"].items():
            torch.testing.assert_close(value, before["state"][key], rtol=0, atol=0)

    run_ranks(mesh, rank)


TOTALS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "sum of squares": lambda p: torch.sum(p.pow(2), dtype=torch.float64),
    "mean": lambda p: p.data.mean(),
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: torch.norm(p, 1),
    "largest": lambda p: p.abs().max(),
    "smallest": lambda p: torch.amin(p * 3 - 1),
    "norm inf": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "frobenius": lambda p: torch.linalg.norm(p),
    "of a view": lambda p: p.view(-1).norm() + p.flatten().unsqueeze(0).sum(),
    "any": lambda p: (p > 0.99).any(),
    "all": lambda p: (p > -0.99).all(),
    "not finite": lambda p: torch.isnan(p / (p - p.max())).any(),
    "count": lambda p: (p > 0).sum(),
    "nonzero": lambda p: torch.count_nonzero(p),
}


@pytest.mark.parametrize("name", TOTALS)
def test_a_reduction_to_one_entry_is_that_of_the_whole_weight(name: str) -> None:
    reduced = TOTALS[name]

    def rank(comm: Comm) -> None:
        net: Any = weft.parallelize(Mlp(), comm, axes=AXES)
        whole: Any = Mlp()
        with torch.no_grad():
            for mine, theirs in ((net.up, whole.up), (net.down, whole.down)):
                torch.testing.assert_close(reduced(mine.weight), reduced(theirs.weight))

    run_ranks("tp2", rank)


STATISTICS: dict[str, Callable[[Any], Any]] = {
    "variance": lambda p: p.var(),
    "sum of rows": lambda p: p.sum(dim=1),
    "mean by axis": lambda p: p.mean(axis=1),
    "spectral norm": lambda p: torch.linalg.norm(p, 2),
    "nuclear norm": lambda p: torch.norm(p, "nuc"),
    "rows that keep dims": lambda p: torch.norm(p, dim=1, keepdim=True),
    "norm of a transpose": lambda p: p.T.norm(dim=0),
    "product": lambda p: p.T @ p,
    "norm of several": lambda p: torch.cat([p.view(-1), torch.ones(3, dtype=p.dtype)]).norm(),
    "norm of some": lambda p: p[:1].norm(),
    "product of several": lambda p: torch.cat([p.view(-1)]).dot(torch.cat([p.view(-1)])),
    "median": lambda p: p.median(),
    "largest entries": lambda p: p.abs().view(-1).topk(3),
    "place of the largest": lambda p: torch.argmax(p),
    "softmax": lambda p: torch.softmax(p, dim=-1),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_other_statistics_are_one_line(name: str) -> None:
    def rank(comm: Comm) -> None:
        net: Any = weft.parallelize(Mlp(), comm, axes=AXES)
        with torch.no_grad():
            STATISTICS[name](net.down.weight)

    with pytest.raises(PlanError, match=r"of a weight of which each rank along tp has a part"):
        run_ranks("tp2", rank)


class Fused(nn.Module):
    """Gate and up projection in one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(5, 12, dtype=torch.float64)
        self.down = nn.Linear(6, 5, dtype=torch.float64)
        set_values(self)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        y: Tensor = self.down(torch.tanh(gate) * up)
        return y


def test_fused_projections_are_whole_in_a_sharded_optimizer() -> None:
    axes = {"both.weight": (Stacked(("ffn", 6), ("ffn", 6)), None), "down.weight": (None, "ffn")}
    expected = Fused()
    train(expected, torch.optim.Adafactor(expected.parameters(), lr=0.1))

    def rank(comm: Comm) -> None:
        net = weft.parallelize(Fused(), comm, axes=axes)
        train(net, ShardedOptimizer(net.parameters(), torch.optim.Adafactor, comm, lr=0.1))
        torch.testing.assert_close(net(X), expected(X), rtol=1e-10, atol=1e-12)

    run_ranks("tp2", rank)


def muon(params: Iterable[Any]) -> Optimizer:
    return torch.optim.Muon([each for each in params if each.ndim == 2])


def orthogonal(params: Iterable[Any]) -> Optimizer:
    return Orthogonal([each for each in params if each.ndim == 2])


def lbfgs(params: Iterable[Any]) -> Optimizer:
    return WithClosure(params)


class WithClosure(torch.optim.LBFGS):
    """LBFGS, in a loop that has no closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step(lambda: torch.zeros(()))


@pytest.mark.parametrize("make", [orthogonal, muon, lbfgs, torch.optim.Adafactor, RowMeans])
@pytest.mark.parametrize(("mesh", "wrap"), WRAPS)
def test_products_and_statistics_of_rows_are_one_line(make: Make, mesh: str, wrap: Wrap) -> None:
    def rank(comm: Comm) -> None:
        net = wrap(weft.parallelize(Mlp(), comm, axes=AXES), comm)
        train(net, make(net.parameters()), own_batch(comm))

    with pytest.raises(PlanError, match=r"of a weight of which each rank along tp has a part"):
        run_ranks(mesh, rank)


@pytest.mark.parametrize("foreach", [False, True])
def test_states_of_a_file_are_those_of_parts(foreach: bool) -> None:
    """Their norms are those of whole layers after they were loaded, too."""
    expected = Mlp()
    train(expected, NormOfMomentum(expected.parameters(), foreach=foreach))
    train(expected, NormOfMomentum(expected.parameters(), foreach=foreach))

    def rank(comm: Comm) -> None:
        net: Any = weft.parallelize(Mlp(), comm, axes=AXES)
        for _ in range(2):
            optimizer = NormOfMomentum(net.parameters(), foreach=foreach)
            train(net, optimizer)
        torch.testing.assert_close(net(X), expected(X), rtol=1e-10, atol=1e-12)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        loaded = NormOfMomentum(net.parameters(), foreach=foreach)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        other = copy.deepcopy(expected)
        other_optimizer = NormOfMomentum(other.parameters(), foreach=foreach)
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            momentum = loaded.state[mine]["momentum"]
            assert type(momentum) is Tensor, "of a file"
            assert momentum.shape == mine.shape
            other_optimizer.state[theirs]["momentum"] = torch.zeros_like(theirs)
            momentum.zero_()
        train(net, loaded)
        train(other, other_optimizer)
        torch.testing.assert_close(net(X), other(X), rtol=1e-10, atol=1e-12)

    run_ranks("tp2", rank)


@pytest.mark.slow  # imports the compiler
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_layers_are_one_graph() -> None:
    def rank(comm: Comm) -> None:
        net: Any = weft.parallelize(Mlp(), comm, axes=AXES)
        compiled: Any = torch.compile(net, backend="aot_eager", fullgraph=True)
        mse_loss(compiled(X), Y).backward()
        expected: Any = Mlp()
        mse_loss(expected(X), Y).backward()
        torch.testing.assert_close(net.up.weight.grad.norm(), expected.up.weight.grad.norm())

    run_ranks("tp2", rank, takes_turns=True)


def test_one_rank_reads_its_part_alone() -> None:
    """Texts, arrays, histograms and plain tensors of a part wait for no other rank."""

    def rank(comm: Comm) -> None:
        net: Any = weft.parallelize(Mlp(), comm, axes=AXES)
        if comm.index("tp") == 0:
            weight = net.down.weight
            part = weight.detach().as_subclass(Tensor)
            torch.testing.assert_close(part, Mlp().down.weight.detach()[:, :4])
            assert type(part.std()) is Tensor
            assert f"{weight}" == f"{weight!r}"
            assert weight.tolist() == part.tolist()
            assert weight[0, 1].item() == weight[0, 1].sum().item() == float(part[0, 1])
            assert (weight.detach().cpu().numpy() == part.numpy()).all()

    run_ranks("tp2", rank, timeout_s=5)


@pytest.mark.parametrize(("mesh", "wrap"), [WRAPS[0], WRAPS[2]])
def test_a_distributed_checkpoint_of_parts_is_one_line(mesh: str, wrap: Wrap) -> None:
    """torch would store one rank's part as the whole weight."""

    def rank(comm: Comm) -> None:
        net = wrap(weft.parallelize(Mlp(), comm, axes=AXES), comm)
        items = [
            each
            for key, value in net.state_dict().items()
            for each in create_write_items(key, value)
        ]
        assert not items

    with pytest.raises(PlanError, match=r"up.weight: is of a tensor-parallel layer.*weft\.save"):
        run_ranks(mesh, rank)


def test_a_copy_and_a_file_of_a_part() -> None:
    """A deep copy is a part, too; a file has plain values, which one process loads."""

    def rank(comm: Comm) -> None:
        net: Any = weft.parallelize(Mlp(), comm, axes=AXES)
        copied = copy.deepcopy(net)
        torch.testing.assert_close(copied.up.weight.norm(), Mlp().up.weight.norm())
        values = copy.deepcopy(net.state_dict())
        assert values["up.weight"].shape == net.up.weight.shape
        net.load_state_dict(values)

    run_ranks("tp2", rank)
