"""PipelineParallel around plain modules."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.parallel.pipeline.module import PipelineParallel
from weft.testing import run_ranks


def chain() -> list[nn.Module]:
    torch.manual_seed(3)
    widths = (6, 10, 7, 9, 5, 4)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in itertools.pairwise(widths)]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(24, 6, dtype=torch.float64, generator=generator),
        torch.randn(24, 4, dtype=torch.float64, generator=generator),
    )


@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks"),
    [
        ("pp2", "1f1b", 1),
        ("pp5", "gpipe", 1),
        ("pp2 dp2", "1f1b", 1),
        ("pp2", "interleaved", 2),
        ("dp3", "1f1b", 1),
        ("pp2", "interleaved", None),
        ("pp2 dp2", "zero_bubble", None),
        ("pp2", "zbv", None),
        ("pp2", "dual_pipe_v", None),
    ],
)
def test_pipeline_of_plain_modules_has_the_gradients_of_one_process(
    mesh: str, schedule: str, chunks: int | None
) -> None:
    blocks, (x, y) = chain(), data()
    whole = nn.Sequential(*copy.deepcopy(blocks))
    loss = nn.functional.mse_loss(whole(x), y)
    loss.backward()
    want = dict(whole.named_parameters())

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        mine = [part.chunk(comm.degree("dp"))[comm.index("dp")] for part in (x, y)]
        pipe = PipelineParallel(
            copy.deepcopy(blocks),
            comm,
            loss=nn.functional.mse_loss,
            example=x[:2],
            microbatches=len(mine[0]) // 2,
            schedule=schedule,
            chunks=chunks,
        )
        value = pipe.step(mine[0], mine[1]).item()
        return value, {
            name.replace(".module", ""): p.grad for name, p in pipe.model.params.items() if p.grad is not None
        }

    seen: set[str] = set()
    for value, grads in run_ranks(mesh, rank):
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name].grad, rtol=1e-11, atol=1e-15)
            seen.add(name)
    assert seen == set(want)
