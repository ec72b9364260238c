"""The training that both sides of a comparison run: one small LLaMA, the same values, tokens and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward, token_batch
from weft.models.llama3 import config as llama3
from weft.prove.layout import micro_batches
from weft.prove.oracle import plain_model
from weft.train.build import build_model
from weft.train.optim import make_optimizer
from weft.train.step import TrainStep

Step = Callable[[], float]
"""One training step; the mean loss over all ranks."""

SEED, CLIP = 1, 1.0
OPTIM = OptimConfig(lr=1e-4, weight_decay=0.0)


@dataclass(frozen=True)
class Size:
    """A model, the tokens of one step over all ranks, and how many steps a turn takes."""

    config: llama3.Config
    sequences: int
    seq_len: int
    steps: int

    def __str__(self) -> str:
        cfg = self.config
        return f"{cfg.layers} layers of {cfg.dim}, {self.sequences} x {self.seq_len} tokens a step"

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.sequences * self.seq_len


def _llama(layers: int, dim: int, ffn: int, heads: int) -> llama3.Config:
    return llama3.Config(layers=layers, dim=dim, heads=heads, kv_heads=heads, ffn=ffn, vocab=256)


SMALL, TINY = _llama(6, 384, 1024, 6), _llama(4, 64, 176, 2)
"""10.8 M parameters, where products of matrices take most of the time; 0.2 M, where everything else does."""


@dataclass(frozen=True)
class Course:
    """One race as one rank sees it. `comm` is weft's; torch.distributed has a world of its own beside it."""

    size: Size
    comm: Comm

    @property
    def batch(self) -> Batch:
        """The step's whole batch, the same every step."""
        shape = (self.size.sequences, self.size.seq_len + 1)
        tokens = torch.randint(0, self.size.config.vocab, shape, generator=torch.Generator().manual_seed(0))
        return token_batch(tokens[:, :-1], tokens[:, 1:])

    @property
    def own_rows(self) -> Batch:
        """This rank's sequences where ranks share the batch."""
        share = self.size.sequences // self.comm.mesh.size
        return self.batch.rows(slice(self.comm.rank * share, (self.comm.rank + 1) * share))

    def plain_blocks(self) -> dict[str, nn.Module]:
        """The plain blocks with their starting values, for torch's own wrappers."""
        return plain_model(FAMILIES["llama3"], self.size.config, seed=SEED, dtype=torch.float32)

    def weft_step(self, *, micro: int, chunks: int = 1, **plan: Any) -> Step:
        """weft's trainer under a plan; `micro` is the number of sequences in a micro-batch of one rank."""
        size, mesh = self.size, self.comm.mesh
        made = Plan(
            mesh=mesh,
            family="llama3",
            architecture=canonical_json(size.config.model_dump()),
            stages=make_stages(size.config.block_specs(size.seq_len), mesh.degree("pp") * chunks),
            chunks=chunks,
            microbatches=size.sequences // mesh.degree("dp") // micro,
            micro_size=micro,
            seq_len=size.seq_len,
            clip=CLIP,
            **plan,
        )
        made.check()
        model = build_model(FAMILIES["llama3"], size.config, made, self.comm, seed=SEED)
        train = TrainStep(model, make_optimizer=lambda tensors: make_optimizer(tensors, OPTIM), clip=CLIP)
        mine = micro_batches(self.batch, made, self.comm.rank)
        return lambda: train(mine, lr=OPTIM.lr).loss


class Chain(nn.Module):
    """The plain blocks as one module: the mean loss of a batch."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, batch: Batch) -> Tensor:
        return forward(self.blocks, batch) / batch.num_targets()


ADAMW: dict[str, Any] = {
    "lr": OPTIM.lr, "betas": OPTIM.betas, "eps": OPTIM.eps, "weight_decay": OPTIM.weight_decay, "fused": True
}  # fmt: skip
"""weft's numbers for torch's AdamW, with the fastest of its kernels."""


def torch_adamw(*groups: Iterable[Tensor]) -> torch.optim.AdamW:
    """torch's optimizer; tensors of two kinds have to be in two groups."""
    return torch.optim.AdamW([{"params": list(group)} for group in groups], **ADAMW)
