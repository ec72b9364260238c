"""Statistics over a sharded width: values and gradients of the whole one; what the sharding trace finds and rejects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.parallel.tensor.dims import DimFactor, ShardingError, is_sharded
from weft.parallel.tensor.region import Region
from weft.parallel.tensor.sharding_mode import ShardingTrace, Value
from weft.parallel.tensor.width_statistics import StatisticsMode, compute_over_ranks
from weft.testing import run_ranks

WIDTH = 12
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, w: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
    "mean by name": lambda x, w: w * x / torch.mean(input=x.abs(), dim=-1).unsqueeze(-1),
    "sum": lambda x, w: w * x / x.square().sum(dim=2, keepdim=True).sqrt(),
    "var": lambda x, w: w * (x - x.mean((-1,), True)) / x.var(-1, keepdim=True),
    "biased var": lambda x, w: w * x / torch.var(x, dim=-1, keepdim=True, unbiased=False),
    "rms_norm": lambda x, w: F.rms_norm(x, (WIDTH,), w),
    "layer_norm": lambda x, w: F.layer_norm(x, normalized_shape=(WIDTH,), weight=w, bias=w),
}


class Norm(nn.Module):
    """A norm of any function."""

    def __init__(self, name: str, weight: Tensor) -> None:
        super().__init__()
        self.compute, self.weight = FUNCTIONS[name], nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight)


def results(name: str, comm: Comm | None) -> tuple[Tensor, ...]:
    """Output, and gradients of x and of the weight: of this rank's part of the width, or of all."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, weight, factor = make(2, 3, WIDTH), make(WIDTH), make(2, 3, WIDTH)
    if comm is not None:
        own = lambda tensor: tensor.chunk(2, -1)[comm.index("tp")].clone()  # noqa: E731
        x, weight, factor = own(x), own(weight), own(factor)
    norm = Norm(name, weight)
    if comm is not None:
        compute_over_ranks(norm, [x.shape[-1]] * 2, Region(comm, "tp", sequence_parallel=False))
    y = norm(x.requires_grad_())
    (y * factor).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None
    return y.detach(), x.grad, norm.weight.grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_the_whole_width(name: str) -> None:
    of_ranks = run_ranks("tp2", lambda comm: results(name, comm))
    for parts, whole in zip(zip(*of_ranks, strict=True), results(name, None), strict=True):
        torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-12, atol=1e-12)


def sharded(trace: ShardingTrace) -> Tensor:
    """q_BS(HK) inside a region, on the meta device."""
    x = torch.empty(2, 3, 6, device="meta")
    dims = ((DimFactor(2),), (DimFactor(3),), (DimFactor(6, sharded=True),))
    return trace.set(x, Value(dims, inside=True, activation=True))


def test_the_trace_follows_statistics_of_modules_without_children_alone() -> None:
    trace = ShardingTrace(degree=2, sequence_parallel=False)
    x = sharded(trace)
    with trace, StatisticsMode(trace.width_of):
        trace.enter_leaf("layer0.norm")
        mean = x.square().mean(-1, keepdim=True)
        trace.leave_leaf()
        assert not any(map(is_sharded, trace.value(mean).dims))
        assert trace.value(mean).inside
        with pytest.raises(ShardingError, match="mean over a sharded dim"):
            x.mean(-1)
    assert trace.findings.statistics == {"layer0.norm": (6,)}


def test_a_norm_that_is_called_on_a_sharded_width_and_on_a_whole_one_is_rejected() -> None:
    trace = ShardingTrace(degree=2, sequence_parallel=False)
    x = sharded(trace)
    with trace, StatisticsMode(trace.width_of):
        trace.enter_leaf("layer0.norm")
        x.mean(-1)
        trace.leave_leaf()
        trace.enter_leaf("layer0.norm")
        torch.empty(2, 3, 6, device="meta").mean(-1)
        with pytest.raises(ShardingError, match="a norm is called on a sharded width and on anoth"):
            trace.leave_leaf()


def test_what_is_written_into_a_part_of_a_new_tensor_shards_the_whole() -> None:
    """Keys of latent attention: a sharded part, and one that is the same for all heads."""
    trace = ShardingTrace(degree=2, sequence_parallel=False)
    part = trace.set(
        torch.empty(2, 3, 4, device="meta"),
        Value(((DimFactor(2),), (DimFactor(3, sharded=True),), (DimFactor(4),)), inside=True),
    )
    with trace:
        whole = part.new_empty(2, 3, 6)
        whole[..., :4].copy_(part)
        assert list(map(is_sharded, trace.value(whole).dims)) == [False, True, False]
        with pytest.raises(ShardingError, match="a whole dim is written into a sharded one"):
            whole[..., 4:].copy_(torch.empty(2, 3, 2, device="meta"))
        with pytest.raises(ShardingError, match="a sharded dim is written into a part of another"):
            part.new_empty(2, 5, 4)[:, :3].copy_(part)
