"""Wrappers with each other, with torch's utilities and tensor-parallel layers: equal to one process, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import weft
from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.pipeline.module import PipelineParallel
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.testing import run_ranks

X, Y = torch.linspace(-1, 1, 64, dtype=torch.float64).sin().view(2, 8, 4)


def layers(seed: int = 0, *, sizes: Sequence[int] = (4, 4, 4)) -> list[nn.Module]:
    """Linears of different values, without torch's generator, which rank threads share."""
    found: list[nn.Module] = []
    for number, (size, out) in enumerate(pairwise(sizes)):
        linear = nn.Linear(size, out, dtype=torch.float64)
        with torch.no_grad():
            for param in linear.parameters():
                entries = torch.arange(param.numel(), dtype=torch.float64)
                param.copy_((entries * (number + seed + 1.3)).cos().view_as(param))
        found.append(linear)
    return found


def own_part(x: Tensor, comm: Comm) -> Tensor:
    return x.chunk(comm.degree("dp"))[comm.index("dp")]


def pipeline(blocks: Sequence[nn.Module], comm: Comm, **options: Any) -> PipelineParallel:
    example = own_part(X, comm)[:2]
    options = {"microbatches": 8 // comm.degree("dp") // 2, **options}
    return PipelineParallel(blocks, comm, loss=mse_loss, example=example, **options)


def synchronised(comm: Comm) -> Any:
    """A pipeline whose gradients are in place."""
    pipe = pipeline(layers(), comm)
    pipe.step(own_part(X, comm), own_part(Y, comm))
    return pipe


def fsdp(comm: Comm, module: nn.Module | None = None) -> Any:
    """A wrapped module whose gradients are in place."""
    net = FullyShardedDataParallel(module or nn.Sequential(*layers()), comm)
    mse_loss(net(own_part(X, comm)), own_part(Y, comm)).backward()
    net.finish_gradient_synchronization()
    return net


def rejected(mesh: str, rank: Callable[[Comm], object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        run_ranks(mesh, rank)


def expected_clipping(max_norm: float) -> tuple[float, list[Tensor]]:
    whole = nn.Sequential(*layers())
    mse_loss(whole(X), Y).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
    return float(norm), [param.grad for param in whole.parameters() if param.grad is not None]


def test_norms_and_loss_scaling_of_a_part_of_the_stages_are_rejected() -> None:
    mesh = "pp2"

    def clip(comm: Comm) -> None:
        nn.utils.clip_grad_norm_(synchronised(comm).parameters(), 1.0)

    def unscale(comm: Comm) -> None:
        gradients = [param.grad for param in synchronised(comm).parameters()]
        found, scale = torch.zeros(2, 1)  # as torch.amp.GradScaler does
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)

    rejected(mesh, clip, r"Fix: clip_grad_norm_.* of the pipeline")
    rejected(mesh, unscale, "checks this rank's part alone")


@pytest.mark.parametrize("mesh", ["pp2", "pp2 dp2"])
def test_a_pipeline_clips_by_the_norm_of_all_stages(mesh: str) -> None:
    norm, gradients = expected_clipping(0.01)

    def rank(comm: Comm) -> None:
        pipe = synchronised(comm)
        assert float(pipe.clip_grad_norm_(0.01)) == pytest.approx(norm, rel=1e-12)
        own = gradients[2 * comm.index("pp") :]
        for param, gradient in zip(pipe.parameters(), own, strict=False):
            torch.testing.assert_close(param.grad, gradient, rtol=1e-10, atol=1e-15)

    run_ranks(mesh, rank)


def parallel_linears(comm: Comm) -> nn.Sequential:
    """This rank's part of `layers()`."""
    up, down = layers()
    column = ColumnParallelLinear(4, 4, comm=comm, dtype=torch.float64)
    row = RowParallelLinear(4, 4, comm=comm, dtype=torch.float64)
    index = comm.index("tp")
    with torch.no_grad():
        column.weight.copy_(up.weight.chunk(2)[index])
        column.bias.copy_(up.bias.chunk(2)[index])
        row.weight.copy_(down.weight.chunk(2, 1)[index])
        row.bias.copy_(down.bias)
    return nn.Sequential(column, row)


@pytest.mark.parametrize("mesh", ["tp2", "dp2 tp2"])
def test_parallel_layers_clip_by_the_norm_of_the_whole_model(mesh: str) -> None:
    """Plain and in a DistributedDataParallel, in a second step too, whose gradients are added in place."""
    norm, gradients = expected_clipping(0.01)

    def rank(comm: Comm) -> None:
        net: Any = parallel_linears(comm)
        wrapped = DistributedDataParallel(net, comm) if comm.degree("dp") > 1 else net
        for _ in range(2):
            net.zero_grad(set_to_none=False)
            mse_loss(wrapped(own_part(X, comm)), own_part(Y, comm)).backward()
            if wrapped is not net:
                wrapped.finish_gradient_synchronization()
            total = nn.utils.get_total_norm([param.grad for param in net.parameters()])
            assert float(total) == pytest.approx(norm)
            assert float(weft.clip_grad_norm_(net.parameters(), 0.01, comm)) == pytest.approx(norm)
        index = comm.index("tp")
        up, up_bias, down, down_bias = gradients
        weights = [param.grad for param in net.parameters() if param.ndim == 2]
        for of_rows, whole in zip(weights, (up.chunk(2)[index], down), strict=True):
            torch.testing.assert_close(of_rows.norm(dim=1), whole.norm(dim=1))
        torch.testing.assert_close(weights[0].norm(dim=()), up.norm())
        expected = up.chunk(2)[index], up_bias.chunk(2)[index], down.chunk(2, 1)[index], down_bias
        for param, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, gradient, rtol=1e-10, atol=1e-15)

    run_ranks(mesh, rank)


def test_the_norm_of_shards_counts_tensor_parallel_layers_on_every_rank() -> None:
    norm, _ = expected_clipping(1.0)

    def rank(comm: Comm) -> float:
        return float(fsdp(comm, parallel_linears(comm)).clip_grad_norm_(1.0))

    assert run_ranks("dp2 tp2", rank) == pytest.approx([norm] * 4, rel=1e-12)


def test_a_pipeline_of_tensor_parallel_layers_is_rejected() -> None:
    def rank(comm: Comm) -> None:
        pipeline(list(parallel_linears(comm)), comm)

    rejected("pp2 tp2", rank, "sharded over tp already")


def test_the_whole_bias_of_a_row_parallel_linear_starts_alike_on_all_ranks() -> None:
    def rank(comm: Comm) -> list[float]:
        return RowParallelLinear(5, 3, comm=comm).bias.tolist()

    first, second = run_ranks("tp2", rank)
    assert first == second


def test_replicas_and_shared_layers_of_a_pipeline_start_alike() -> None:
    def rank(comm: Comm) -> dict[str, Tensor]:
        first, second = layers(seed=comm.rank)
        pipe = pipeline([first, second, first], comm)
        pipe.step(own_part(X, comm), own_part(Y, comm))
        return {name: param.detach().clone() for name, param in pipe.model.params.items()}

    ranks = run_ranks("pp2 dp2", rank)
    values = [list(params.values()) for params in ranks]
    copies = [params[:2] for params in (values[0], values[1])]
    assert len(ranks) == 4
    torch.testing.assert_close(ranks[0], ranks[1], rtol=0, atol=0)
    torch.testing.assert_close(ranks[2], ranks[3], rtol=0, atol=0)
    torch.testing.assert_close(copies[0], values[2][-2:], rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, FullyShardedDataParallel])
def test_a_pipeline_reduces_its_own_gradients(wrap: Callable[[nn.Module, Comm], nn.Module]) -> None:
    match = "wrapped module already"
    rejected("pp2 dp2", lambda comm: wrap(pipeline(layers(), comm), comm), match)
    rejected("dp2", lambda comm: pipeline([wrap(each, comm) for each in layers()], comm), match)


def test_misuse_of_a_pipeline_is_one_line() -> None:
    def without_gradients(comm: Comm) -> None:
        with torch.no_grad():
            synchronised(comm)

    class Several(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), "text"

    several = [Several(4, 4, dtype=torch.float64), *layers()]
    rejected("dp1", without_gradients, "gradients are disabled")
    rejected("dp1", lambda comm: pipeline(several, comm), "is neither a tensor nor None")
    rejected("pp2", lambda comm: pipeline(layers()[:1], comm), "a stage would have none")
    uneven = {"schedule": "interleaved", "microbatches": 3}
    many = layers(sizes=(4,) * 5)
    rejected("pp2", lambda comm: pipeline(many, comm, **uneven), "to be a multiple of the pipe")
    rejected("dp1", lambda comm: copy.deepcopy(pipeline(layers(), comm)), "cannot be copied")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_hooks_compute_are_those_of_one_process() -> None:
    """Under ZeRO 3, and in a pipeline, which copies blocks to see what they return."""

    def make() -> nn.Module:
        first, second = layers()
        return nn.Sequential(nn.utils.weight_norm(first), second)

    whole = make()
    mse_loss(whole(X), Y).backward()
    expected = nn.utils.get_total_norm([param.grad for param in whole.parameters()])
    for norm in run_ranks("dp2", lambda comm: fsdp(comm, make()).clip_grad_norm_(1.0)):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for loss in run_ranks("pp2", lambda comm: pipeline([*make()], comm).step(X, Y)):
        torch.testing.assert_close(loss, mse_loss(whole(X), Y).detach(), rtol=1e-12, atol=0)


def test_fresh_states_of_a_sharded_optimizer_are_loaded() -> None:
    def made(comm: Comm) -> tuple[nn.Linear, ShardedOptimizer]:
        (linear,) = layers(sizes=(4, 4))
        optimizer = ShardedOptimizer(
            linear.parameters(), torch.optim.AdamW, comm, lr=0.1, betas=(0.8, 0.9)
        )
        return linear, optimizer

    def fresh_states(comm: Comm) -> Any:
        linear, optimizer = made(comm)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
        fresh = optimizer.full_state_dict()
        linear(X).sum().backward()
        optimizer.step()
        optimizer.load_full_state_dict(fresh)
        return optimizer.full_state_dict()["state"]

    assert run_ranks("dp2", fresh_states) == [{}, {}]


def test_parallel_linears_are_cast_by_autocast_as_linears_are() -> None:
    def train(net: nn.Module) -> tuple[Tensor, Tensor]:
        x = X.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y.float().square().mean().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    whole = nn.Sequential(*layers()).float()
    expected = train(whole)

    def rank(comm: Comm) -> None:
        net = parallel_linears(comm).float()
        for found, want in zip(train(net), expected, strict=True):
            assert found.dtype == want.dtype
            torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-8)
        assert all(
            param.grad is not None and param.grad.dtype == torch.float32
            for param in net.parameters()
        )

    run_ranks("tp2", rank)


class Transformer(nn.Module):
    """Attention by heads, a feed-forward layer, an embedding and a head, as torch's examples have them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "q": (8, 8),
            "k": (8, 8),
            "v": (8, 8),
            "o": (8, 8),
            "up": (8, 12),
            "down": (12, 8),
            "head": (8, 10),
        }
        self.embed = nn.Embedding(10, 8, dtype=torch.float64)
        for number, (name, shape) in enumerate(sizes.items()):
            linear = nn.Linear(*shape, bias=name in ("up", "down"), dtype=torch.float64)
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) / 3)
            setattr(self, name, linear)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (
            linear(x).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        x = x + self.down(torch.relu(self.up(x)))
        logits: Tensor = self.head(x)
        return logits


AXES = {
    "[qkv].weight": ("heads", None),
    "o.weight": (None, "heads"),
    "up.weight": ("ffn", None),
    "up.bias": ("ffn",),
    "down.weight": (None, "ffn"),
    "embed.weight": ("vocab", None),
    "head.weight": ("vocab", None),
}


@pytest.mark.parametrize("mesh", ["tp2", "tp4", "dp2 tp2"])
def test_a_plain_module_is_made_tensor_parallel_by_a_table(mesh: str) -> None:
    tokens = torch.arange(24).view(4, 6) * 7 % 10
    whole = Transformer()
    with torch.no_grad():
        whole.embed.weight.copy_(torch.linspace(-1, 1, 80).view(10, 8).sin())
    plain = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        whole(tokens).square().mean().backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
    expected = whole(tokens)

    def rank(comm: Comm) -> None:
        net: Any = weft.parallelize(copy.deepcopy(plain), comm, axes=AXES, gathered=["head"])
        assert sum(isinstance(each, ColumnParallelLinear) for each in net.modules()) == 5
        wrapped = DistributedDataParallel(net, comm) if comm.degree("dp") > 1 else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(own_part(tokens, comm)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        torch.testing.assert_close(net(tokens), expected, rtol=1e-12, atol=1e-13)

    run_ranks(mesh, rank)


def test_a_deep_copy_of_parallel_layers_is_clipped_by_the_norm_of_all_ranks() -> None:
    norm, _ = expected_clipping(1.0)

    def rank(comm: Comm) -> float:
        net = copy.deepcopy(parallel_linears(comm))
        mse_loss(net(X), Y).backward()
        return float(nn.utils.clip_grad_norm_(net.parameters(), 1.0))

    assert run_ranks("tp2", rank) == pytest.approx([norm] * 2, rel=1e-12)


def test_a_table_that_cannot_be_followed_is_one_line() -> None:
    def with_axes(axes: Any, **options: Any) -> Callable[[Comm], object]:
        return lambda comm: weft.parallelize(Transformer(), comm, axes=axes, **options)

    rejected("tp2", with_axes({"up.weight": ("ffn", "ffn")}), "is sharded along both dims")
    rejected("tp2", with_axes({"up.weight": ("ffn",)}), "needs one name, or None, for each dim")
    rejected(
        "tp2", with_axes({"embed.weight": (None, "dim")}), "is an embedding that cannot be sharded"
    )
    rejected("tp2", with_axes(AXES, gathered=["haed"]), "names no layer")
