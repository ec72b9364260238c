"""Modules of many kinds in wrappers, and use that would train other values: equal to one process, or an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.parallel.autograd.split_backward import SplitBackward
from weft.parallel.autograd.tree import map_leaves
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.data_parallel.replicas import DataParallel
from weft.parallel.pipeline.module import PipelineParallel
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.testing import run_ranks

X = torch.linspace(-1, 1, 48, dtype=torch.float64).sin().view(12, 4)
LR = 0.1
Zero = Literal[1, 2, 3]


def filled(module: nn.Module) -> nn.Module:
    """In float64 with values that differ, without torch's generator, which rank threads share."""
    module.double()
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            entries = torch.arange(param.numel(), dtype=torch.float64)
            param.copy_((entries * (number + 1.3)).cos().view_as(param))
    return module


def own_part(x: Tensor, comm: Comm) -> Tensor:
    return x.chunk(comm.degree("dp"))[comm.index("dp")]


@dataclass(frozen=True)
class Hidden:
    """What a block of `DataClass` returns."""

    x: Tensor
    number: int


class DataClass(nn.Module):
    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Hidden(super().forward(x).tanh(), number=3)

    def __init__(self) -> None:
        super().__init__()
        self.first = DataClass.Block(4, 4)
        self.second = DataClass.Block(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).x).x


class Lists(nn.Module):
    """Parameters in a list and a dict, which are modules without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.empty(4, 4), torch.empty(4, 4)])
        self.named = nn.ParameterDict({"bias": torch.empty(4)})
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.last(x + self.named["bias"])


class Positions(nn.Module):
    """A block that returns views of its parameter, and one that returns the parameter."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.empty(6, 4))

        def forward(self, stop: int) -> Any:
            return {"rows": self.rows[:stop], "all": self.rows}

    def __init__(self) -> None:
        super().__init__()
        self.rows = Positions.Rows()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        found = self.rows(4)
        return self.last(x @ found["rows"]) + found["all"].sum(0)


@pytest.mark.parametrize("kind", [DataClass, Lists, Positions])
def test_modules_of_every_kind_train_as_in_one_process_under_zero_3(
    kind: Callable[[], nn.Module],
) -> None:
    whole = filled(kind())
    whole(X).square().mean().backward()
    expected = {}
    for name, param in whole.named_parameters():
        assert param.grad is not None
        expected[name] = param.detach() - LR * param.grad

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = FullyShardedDataParallel(filled(kind()), comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        net(own_part(X, comm)).square().mean().backward()
        net.finish_gradient_synchronization()
        optimizer.step()
        return net.full_state_dict()

    for state in run_ranks("dp2", rank):
        torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-14)


class BesideBlock(nn.Module):
    """Uses the weight of a block that it does not call, after the block that comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), self.head.weight)


def test_a_weight_that_is_used_outside_of_its_block_is_an_error() -> None:
    """It was read while it was prefetched: values of whatever the memory had held."""

    def rank(comm: Comm) -> None:
        net = FullyShardedDataParallel(filled(BesideBlock()), comm)
        output = net(X)
        assert output.isnan().all()
        output.square().sum().backward()

    with pytest.raises(PlanError, match=r"head.weight: was used outside .* Fix: call the module"):
        run_ranks("dp2", rank)


# buffers


def normalised() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))


def expected_statistics(parts: list[Tensor]) -> dict[str, Tensor]:
    """Buffers of a process that has seen the first rank's samples."""
    net = normalised()
    for part in parts:
        net(part)
    return dict(net.named_buffers())


@pytest.mark.parametrize("wrap", [DistributedDataParallel, FullyShardedDataParallel])
def test_running_statistics_are_those_of_the_first_rank_on_every_rank(wrap: Any) -> None:
    def rank(comm: Comm) -> dict[str, Tensor]:
        net = wrap(normalised(), comm)
        for _ in range(2):
            net(own_part(X, comm)).square().mean().backward()
            net.finish_gradient_synchronization()
        state: dict[str, Tensor] = net.full_state_dict()
        return state

    expected = expected_statistics([X[:6], X[:6]])
    for state in run_ranks("dp2", rank):
        for name, buffer in expected.items():
            torch.testing.assert_close(state[name], buffer, rtol=1e-12, atol=0)


def test_running_statistics_of_a_pipeline_are_those_of_the_first_data_rank() -> None:
    def rank(comm: Comm) -> dict[str, Tensor]:
        blocks = list(normalised().children())
        example = X[:3]
        pipe = PipelineParallel(blocks, comm, loss=F.mse_loss, example=example, microbatches=2)
        pipe.step(own_part(X, comm), own_part(X, comm))
        return dict(blocks[1].named_buffers())

    expected = expected_statistics([X[:3], X[3:6]])
    first_stage = {"1." + name: buffer for name, buffer in run_ranks("pp2 dp2", rank)[1].items()}
    torch.testing.assert_close(first_stage, expected, rtol=1e-12, atol=0)


# gradients that are differentiated again


def force(net: nn.Module, x: Tensor, *, create_graph: bool) -> Tensor:
    """The gradient of the summed output by its input."""
    gradients = torch.autograd.grad(net(x).pow(3).sum(), x, create_graph=create_graph)
    return gradients[0]


def test_a_gradient_penalty_through_tensor_parallel_layers_is_that_of_one_process() -> None:
    whole: Any = filled(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
    up, _, down = whole
    x = X.clone().requires_grad_()
    loss = whole(x).square().sum() + force(whole, x, create_graph=True).square().sum()
    loss.backward()

    def rank(comm: Comm) -> None:
        index = comm.index("tp")
        column = ColumnParallelLinear(4, 6, comm=comm, dtype=torch.float64)
        row = RowParallelLinear(6, 4, comm=comm, dtype=torch.float64)
        with torch.no_grad():
            column.weight.copy_(up.weight.chunk(2)[index])
            column.bias.copy_(up.bias.chunk(2)[index])
            row.weight.copy_(down.weight.chunk(2, 1)[index])
            row.bias.copy_(down.bias)
        net = nn.Sequential(column, nn.Tanh(), row)
        x = X.clone().requires_grad_()
        loss = net(x).square().sum() + force(net, x, create_graph=True).square().sum()
        loss.backward()
        expected = up.weight.grad.chunk(2)[index], down.weight.grad.chunk(2, 1)[index]
        for weight, gradient in zip((column.weight, row.weight), expected, strict=True):
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-10, atol=1e-12)

    run_ranks("tp2", rank)


def test_a_forward_that_computes_gradients_defers_none_of_them_to_a_split_backward() -> None:
    whole: Any = filled(nn.Linear(4, 4))
    split_net: Any = filled(nn.Linear(4, 4))
    x = X.clone().requires_grad_()
    (whole(x) + force(whole, x, create_graph=False)).sum().backward()
    split = SplitBackward(split_net.parameters())
    with split:
        out = split_net(x) + force(split_net, x, create_graph=False)
    out.sum().backward()
    split.backward_weights()
    torch.testing.assert_close(split_net.weight.grad, whole.weight.grad, rtol=1e-12, atol=0)
    match = "create_graph=True, and its backward is split"
    with split, pytest.raises(PlanError, match=match):
        force(split_net, x, create_graph=True)
    match = "with regard to its weights, and its backward is split"
    with split, pytest.raises(PlanError, match=match):
        torch.autograd.grad(split_net(x).sum(), split_net.weight)


# what wrappers reject


def test_a_stage_does_not_begin_with_a_change_of_its_input_in_place() -> None:
    def rank(comm: Comm) -> None:
        blocks = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)]
        order = [blocks[0], blocks[2], blocks[1]]
        PipelineParallel(order, comm, loss=F.mse_loss, example=torch.ones(2, 4), microbatches=2)
        PipelineParallel(
            [*blocks[:2], blocks[1], blocks[2]],
            comm,
            loss=F.mse_loss,
            example=torch.ones(2, 4),
            microbatches=2,
        )

    with pytest.raises(PlanError, match=r"blocks\[2\]: begins a stage, and changes its input"):
        run_ranks("pp2", rank)


def test_outputs_of_replicas_in_a_data_class_are_joined() -> None:
    net: Any = DataParallel(filled(DataClass.Block(4, 4)), ["cpu", "cpu"])
    alone: Any = filled(DataClass.Block(4, 4))
    torch.testing.assert_close(net(X).x, alone(X).x, rtol=1e-12, atol=0)


def test_dicts_of_any_type_keep_what_else_they_have() -> None:
    given = defaultdict(list, x=torch.ones(2), names=["a"])
    doubled = map_leaves({"batch": given}, Tensor, lambda tensor: tensor * 2)["batch"]
    assert doubled["missing"] == []
    assert doubled["x"].tolist() == [2, 2]
    assert given["x"].tolist() == [1, 1]


def test_a_parameter_that_no_replica_uses_has_no_gradient() -> None:
    module: Any = filled(Unused())
    net = DataParallel(module, ["cpu", "cpu"])
    net(X).sum().backward()
    assert module.unused.grad is None
    assert module.used.weight.grad is not None


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


def test_sparse_gradients_of_embeddings_are_summed_over_ranks() -> None:
    tokens = torch.arange(8) % 3

    def embedding() -> nn.Module:
        return filled(nn.Embedding(5, 4, sparse=True))

    whole: Any = embedding()
    whole(tokens).square().mean().backward()
    expected = whole.weight.grad.to_dense()

    def rank(comm: Comm) -> None:
        net: Any = DistributedDataParallel(embedding(), comm)
        net(own_part(tokens, comm)).square().mean().backward()
        net.finish_gradient_synchronization()
        torch.testing.assert_close(net.module.weight.grad, expected, rtol=1e-12, atol=0)

    run_ranks("dp2", rank)


def test_a_column_parallel_linear_takes_one_vector() -> None:
    def rank(comm: Comm) -> None:
        column = ColumnParallelLinear(4, 6, comm=comm, dtype=torch.float64)
        column(X[0]).sum().backward()
        torch.testing.assert_close(column.weight.grad, X[:1].expand(3, 4), rtol=1e-12, atol=0)

    run_ranks("tp2", rank)


class Graph(nn.Module):
    """A layer over a graph, whose adjacency matrix is sparse."""

    def __init__(self, num_edges: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        edges = torch.arange(num_edges)
        values = torch.linspace(1, 2, num_edges, dtype=torch.float64)
        indices = torch.stack([edges, (edges + 1) % 4])
        adjacency = torch.sparse_coo_tensor(indices, values, (4, 4), check_invariants=True)
        self.register_buffer("adjacency", adjacency)
        filled(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.sparse.mm(self.get_buffer("adjacency"), self.linear(x))
        return y


@pytest.mark.parametrize("wrap", [DistributedDataParallel, FullyShardedDataParallel])
def test_a_sparse_buffer_is_that_of_the_first_rank(wrap: Callable[..., Any]) -> None:
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    expected: Tensor = Graph(4)(x)

    def rank(comm: Comm) -> Tensor:
        net = wrap(Graph(4 - comm.rank), comm)
        for _ in range(2):
            y: Tensor = net(x)
            y.sum().backward()
        state = net.full_state_dict()
        torch.testing.assert_close(
            state["adjacency"].to_dense(), Graph(4).get_buffer("adjacency").to_dense()
        )
        return y.detach()

    for y in run_ranks("dp2", rank):
        torch.testing.assert_close(y, expected.detach(), rtol=1e-14, atol=0)


def test_lazy_modules_that_have_not_run_are_rejected() -> None:
    def rank(comm: Comm) -> None:
        for wrap in (DistributedDataParallel, FullyShardedDataParallel):
            lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
            with pytest.raises(
                PlanError, match=r"0.weight of a lazy module .* Fix: call the module"
            ):
                wrap(lazy, comm)
            lazy(torch.ones(2, 3))
            net = wrap(lazy, comm)
            net(torch.ones(2, 3)).sum().backward()
        params = nn.LazyLinear(4).parameters()
        with pytest.raises(PlanError, match="parameter 0 of a lazy module has no shape yet"):
            ShardedOptimizer(params, torch.optim.SGD, comm, lr=0.1)
        with pytest.raises(PlanError, match=r"PipelineParallel: weight of a lazy module"):
            PipelineParallel(
                [nn.LazyLinear(4), nn.ReLU()],
                comm,
                loss=F.mse_loss,
                example=torch.ones(2, 4),
                microbatches=2,
            )

    run_ranks("dp2", rank)
