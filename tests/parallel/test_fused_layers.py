"""Fused projections (`Stacked`) in `weft.parallelize(module, comm, axes)` have the values and checkpoints of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft import Stacked
from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.testing import run_ranks

HEADS, KV_HEADS, HEAD_SIZE, FFN, WIDTH = 4, 2, 3, 8, 12
QKV = Stacked(("heads", HEADS), ("kv_heads", KV_HEADS), ("kv_heads", KV_HEADS))
BOTH = Stacked(("heads", HEADS * HEAD_SIZE), ("ffn", FFN))
AXES = {
    "qkv.weight": (QKV, None),
    "gate_up.weight": (Stacked(("ffn", FFN), ("ffn", FFN)), None),
    "out.weight": (None, BOTH),
    "head.weight": (Stacked(("vocab", 4), ("vocab", 6)), None),
}


class Block(nn.Module):
    """Attention with fused q, k, v beside a gated MLP; one linear reads both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
        self.gate_up = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE + FFN, WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        kv = heads.shape[1] // 4
        q, k, v = heads.split((2 * kv, kv, kv), 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gate, up = self.gate_up(x).chunk(2, -1)
        both = torch.cat((y.transpose(1, 2).flatten(2), F.silu(gate) * up), -1)
        return self.head(x + self.out(both))  # type: ignore[no-any-return]


def batch() -> Tensor:
    return torch.randn(4, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(net: nn.Module, optimizer: Any, x: Tensor, *, steps: int = 3) -> list[Tensor]:
    """Loss, norm of all gradients and outputs of some steps."""
    found: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = net(x)
        loss = y.square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        found.extend((loss.detach(), norm.detach(), y.detach()))
    return found


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


@pytest.mark.parametrize("wrapped", [False, True])
def test_fused_projections_train_as_on_one_process(wrapped: bool, tmp_path: Path) -> None:
    alone = Block()
    one = adam(alone)
    expected = train(alone, one, batch())
    later = train(alone, one, batch(), steps=1)
    folder = str(tmp_path / "saved")

    def rank(comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        net = weft.parallelize(Block(), comm, AXES, gathered=["head"])
        assert net.qkv.weight.shape == ((HEADS + 2 * KV_HEADS) // 2 * HEAD_SIZE, WIDTH)
        assert net.head.out_features == 10
        if wrapped:
            net = weft.FullyShardedDataParallel(net, comm)
        optimizer = adam(net)
        x = batch()
        found = train(net, optimizer, x)
        weft.save(folder, net, optimizer, comm=comm)
        return found, train(net, optimizer, x, steps=1)

    for found, last in run_ranks("dp2 tp2" if wrapped else "tp2", rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(last, later, rtol=1e-12, atol=1e-14)
    restored = Block()
    optimizer = adam(restored)
    train(restored, optimizer, batch(), steps=1)  # so that it has states
    weft.load(folder, restored, optimizer)
    again = train(restored, optimizer, batch(), steps=1)
    torch.testing.assert_close(again, later, rtol=1e-12, atol=1e-14)


def test_a_checkpoint_of_one_process_is_loaded_into_fused_shards(tmp_path: Path) -> None:
    alone = Block()
    one = adam(alone)
    train(alone, one, batch())
    folder = str(tmp_path / "saved")
    weft.save(folder, alone, one)
    later = train(alone, one, batch(), steps=1)

    def rank(comm: Comm) -> list[Tensor]:
        net = weft.parallelize(Block(), comm, AXES, gathered=["head"])
        optimizer = adam(net)
        train(net, optimizer, batch(), steps=1)
        weft.load(folder, net, optimizer, comm=comm)
        return train(net, optimizer, batch(), steps=1)

    for found in run_ranks("tp2", rank):
        torch.testing.assert_close(found, later, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("weight", "axes", "line"),
    [
        (
            "qkv",
            (Stacked(("heads", 4), ("kv_heads", 1), ("kv_heads", 1)), None),
            "part 'kv_heads' of a Stacked dim does not divide (got 1 units; need a multiple of 2 ranks)",
        ),
        (
            "qkv",
            (Stacked(("heads", 5), ("kv_heads", 2)), None),
            "units of heads+kv_heads do not fit (got 24; need a multiple of 7, the units of all parts)",
        ),
    ],
)
def test_units_that_do_not_fit_are_named(weight: str, axes: Any, line: str) -> None:
    def rank(comm: Comm) -> str:
        with pytest.raises(PlanError) as caught:
            weft.parallelize(Block(), comm, {f"{weight}.weight": axes})
        return str(caught.value)

    for text in run_ranks("tp2", rank):
        assert line in text
