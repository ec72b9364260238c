"""Layers that several pipeline ranks share: each copy gets the sum of all gradients, as in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.models.common.batch import Batch
from weft.parallel.pipeline.module import PipelineParallel
from weft.parallel.pipeline.player import Player
from weft.parallel.zero.grad_norm import squared_norm, sum_tied_gradients
from weft.parallel.zero.grouping import make_gradient_reducer
from weft.testing import run_ranks


def chain_with_shared_layer(places: str) -> list[nn.Module]:
    """A block per letter; every "s" is the same layer."""
    torch.manual_seed(3)
    shared = nn.Linear(4, 4)
    layers = [shared if place == "s" else nn.Linear(4, 4) for place in places]
    return [nn.Sequential(layer, nn.Tanh()).double() for layer in layers]


@pytest.mark.parametrize(
    ("places", "mesh", "zero"),
    [
        ("ss", "pp2", None),
        ("asss", "pp2", None),
        ("sas", "pp3", None),
        ("sss", "pp3", 0),
        ("sss", "pp3 dp2", 2),
    ],
)
def test_a_layer_on_several_pipeline_ranks_has_the_sum_of_their_gradients(
    places: str, mesh: str, zero: Literal[0, 2] | None
) -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(2, 8, 4, dtype=torch.float64, generator=generator)
    blocks = chain_with_shared_layer(places)
    whole = copy.deepcopy(blocks)
    loss = nn.functional.mse_loss(nn.Sequential(*whole)(x), y)
    loss.backward()
    norm = nn.utils.get_total_norm(
        [param.grad for param in nn.Sequential(*whole).parameters() if param.grad is not None]
    )

    def rank(comm: Comm) -> dict[str, Tensor]:
        own_x, own_y = (part.chunk(comm.degree("dp"))[comm.index("dp")] for part in (x, y))
        pipe = PipelineParallel(
            copy.deepcopy(blocks),
            comm,
            loss=nn.functional.mse_loss,
            example=own_x[: len(own_x) // 2],
            microbatches=2,
        )
        if zero is None:
            pipe.step(own_x, own_y)
            return {name: param.grad.clone() for name, param in pipe.model.params.items()}
        model = replace(pipe.model, plan=pipe.model.plan.model_copy(update={"zero": zero}))
        reducer = make_gradient_reducer(model)
        player = Player(model, before_last_backward=reducer.set_requires_gradient_sync)
        seed = torch.tensor(0.5 / comm.degree("dp"), dtype=torch.float64)
        no_positions = torch.zeros(0, dtype=torch.int64)
        parts = zip(own_x.chunk(2), own_y.chunk(2), strict=True)
        player.play([Batch(inputs, targets, no_positions) for inputs, targets in parts], seed)
        reducer.finish()
        sum_tied_gradients(model, reducer)
        total = comm.all_reduce(squared_norm(model, reducer), tuple(comm.mesh.wide_axes))
        torch.testing.assert_close(total.sqrt(), norm, rtol=1e-12, atol=0)
        return reducer.full_gradients()

    for gradients in run_ranks(mesh, rank):
        for name, gradient in gradients.items():
            block, _, path = name.partition(".module.")
            expected = whole[int(block)].get_parameter(path).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
