"""Column- and row-parallel linears, one entry per block side, weight gradients computed during the reduction."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.layouts import Case, batches, build_case
from tests.one_device import micro_batches
from tests.parallel.test_traffic import operations_by_name
from weft.comm.comm import Comm
from weft.comm.observe import Counter, Operation
from weft.core.axes import span
from weft.models.common.batch import forward
from weft.parallel.pipeline.player import Player
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.zero.buckets import bucket_reducer
from weft.testing import run_ranks


def whole_mlp() -> tuple[nn.Linear, nn.Linear, Tensor]:
    torch.manual_seed(0)
    return (
        nn.Linear(6, 10).double(),
        nn.Linear(10, 6).double(),
        torch.randn(2, 4, 6, dtype=torch.float64),
    )


class Gradients(NamedTuple):
    """Output of an MLP (column-parallel, then row-parallel linear) and all its gradients."""

    out: Tensor
    x: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mesh", ["tp2", "tp4"])
def test_column_then_row_is_the_whole_mlp_forward_and_backward(mesh: str, sequence: bool) -> None:
    up, down, x = whole_mlp()
    x.requires_grad_()
    hidden = torch.tanh(up(x))
    y = down(hidden)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    loss = (y * weights).sum()
    loss.backward()

    def own_part(whole: Tensor, comm: Comm) -> Tensor:
        """The rank's part of the sequence under sequence parallelism, otherwise all of it."""
        if not sequence:
            return whole.detach()
        parts = whole.detach().chunk(comm.degree("tp"), 1)
        return parts[comm.index("tp")]

    def own_features(comm: Comm) -> slice:
        """Of the 10 between the two linears."""
        lo, hi = span(10, comm.degree("tp"), comm.index("tp"))
        return slice(lo, hi)

    def expected(comm: Comm) -> Gradients:
        features = own_features(comm)
        return Gradients(
            out=own_part(y, comm),
            x=own_part(x.grad, comm),
            up=up.weight.grad[features],
            up_bias=up.bias.grad[features],
            down=down.weight.grad[:, features],
            down_bias=down.bias.grad,
        )

    def actual(comm: Comm) -> Gradients:
        features = own_features(comm)
        options = {"comm": comm, "sequence_parallel": sequence, "dtype": torch.float64}
        column = ColumnParallelLinear(6, 10, **options)
        row = RowParallelLinear(10, 6, **options)
        with torch.no_grad():
            column.weight.copy_(up.weight[features])
            column.bias.copy_(up.bias[features])
            row.weight.copy_(down.weight[:, features])
            row.bias.copy_(down.bias)
        own_x = own_part(x, comm).clone().requires_grad_()
        own_hidden = torch.tanh(column(own_x))
        out = row(own_hidden)
        own_loss = (out * own_part(weights, comm)).sum()
        own_loss.backward()
        down_bias = row.bias.grad
        if sequence:
            down_bias = comm.all_reduce(down_bias, "tp")
        return Gradients(
            out=out.detach(),
            x=own_x.grad,
            up=column.weight.grad,
            up_bias=column.bias.grad,
            down=row.weight.grad,
            down_bias=down_bias,
        )

    def rank(comm: Comm) -> tuple[Gradients, Gradients]:
        return actual(comm), expected(comm)

    for ours, right in run_ranks(mesh, rank):
        torch.testing.assert_close(tuple(ours), tuple(right), rtol=1e-12, atol=1e-14)


def test_gathered_output_is_the_whole_output_also_when_features_do_not_divide() -> None:
    up, _, x = whole_mlp()

    def rank(comm: Comm) -> Tensor:
        lo, hi = span(10, 4, comm.index("tp"))
        column = ColumnParallelLinear(6, 10, comm=comm, gather_output=True, dtype=torch.float64)
        with torch.no_grad():
            column.weight.copy_(up.weight[lo:hi])
            column.bias.copy_(up.bias[lo:hi])
        return column(x).detach()

    for out in run_ranks("tp4", rank):
        torch.testing.assert_close(out, up(x).detach(), rtol=1e-13, atol=1e-14)


@dataclass
class Log:
    """Events in order: collectives started and waited for, gradients accumulated."""

    lines: list[str] = field(default_factory=list)

    def started(self, op: Operation) -> None:
        self.lines.append(f"start {op.op}")

    def finished(self, op: Operation) -> None:
        self.lines.append(f"wait {op.op}")


def test_weight_gradients_are_computed_while_the_input_gradient_is_reduced() -> None:
    case = Case("tp2", family="llama3")

    def rank(comm: Comm) -> list[str]:
        model = build_case(case, comm)
        layer = model.stages[0]["layer1"]
        log = Log()
        for name in ("attn.q", "attn.k", "attn.v"):
            weight = layer.get_parameter(f"{name}.weight")
            weight.register_post_accumulate_grad_hook(
                lambda _, name=name: log.lines.append(f"grad {name}")
            )
        batch = batches(Case("", microbatches=1))[0]
        x = torch.randn(1, 8, 32, dtype=torch.float64, requires_grad=True)
        y = layer.attn(x, batch)
        comm.observers = (log,)
        y.sum().backward()
        return log.lines

    for lines in run_ranks("tp2", rank):
        assert lines[0] == "start all_reduce"
        assert sorted(lines[1:4]) == ["grad attn.k", "grad attn.q", "grad attn.v"]
        assert lines[4:] == ["wait all_reduce"]


@pytest.mark.parametrize("sequence", [False, True])
def test_a_layer_costs_one_operation_per_block_side_and_direction(sequence: bool) -> None:
    """Two block sides (attention, MLP): in each direction one entry or one exit, not one per
    linear.
    """
    case = Case("tp2", family="llama3", sequence=sequence, microbatches=1)

    def rank(comm: Comm) -> dict[str, int]:
        model = build_case(case, comm)
        layer = model.stages[0]["layer1"]
        length = 4 if sequence else 8
        x = torch.randn(1, length, 32, dtype=torch.float64, requires_grad=True)
        counter = Counter()
        comm.observers = (counter,)
        loss = layer(x, batches(Case("", microbatches=1))[0]).sum()
        loss.backward()
        return operations_by_name(counter)

    want = {"all_gather": 4, "reduce_scatter": 4} if sequence else {"all_reduce": 4}
    assert run_ranks("tp2", rank) == [want, want]


def test_sequence_parallel_norm_gradient_is_summed_over_tp_and_others_are_not() -> None:
    def reduced(sequence: bool) -> dict[str, tuple[str, ...]]:
        case = Case("dp2 tp2", family="gpt2", sequence=sequence)

        def rank(comm: Comm) -> dict[str, tuple[str, ...]]:
            model = build_case(case, comm)
            return {name: piece.reduce_axes for name, piece in model.shards.items()}

        return run_ranks("dp2 tp2", rank)[0]

    with_sequence = reduced(True)
    without = reduced(False)
    norms = (
        "layer0.attn_norm.weight",
        "layer0.mlp.down.bias",
        "embed.pos.weight",
        "head.norm.bias",
    )
    assert {with_sequence[name] for name in norms} == {("dp", "tp")}
    assert {without[name] for name in norms} == {("dp",)}
    cut = (
        "layer0.attn.q.weight",
        "layer0.attn.q.bias",
        "layer0.mlp.down.weight",
        "embed.tok.weight",
    )
    axes_with_sequence = {with_sequence[name] for name in cut}
    axes_without = {without[name] for name in cut}
    assert axes_with_sequence == axes_without == {("dp",)}


def test_activations_of_a_sharded_model_equal_the_plain_ones_without_any_backward() -> None:
    case = Case("tp2", family="gpt2", microbatches=1)
    batch = batches(Case("", microbatches=1))[0]

    def rank(comm: Comm) -> float:
        model = build_case(case, comm)
        with torch.no_grad():
            return forward(model.stages[0], batch).item()

    def alone(comm: Comm) -> float:
        plain = Case("", family="gpt2", microbatches=1)
        model = build_case(plain, comm)
        reduce_axes = dict.fromkeys(model.params, ())
        reducer = bucket_reducer(model.params, comm, reduce_axes=reduce_axes)
        player = Player(model, before_last_backward=reducer.set_requires_gradient_sync)
        return player.play(
            micro_batches(copy.deepcopy(batch), plain.plan, 0), torch.tensor(1.0)
        ).loss.item()

    (want,) = run_ranks("", alone)
    assert run_ranks("tp2", rank) == pytest.approx([want, want], rel=1e-13)
