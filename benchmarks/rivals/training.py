"""The training that both sides of a comparison run: one small LLaMA, the same initial values, tokens and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.one_device import micro_batches, plain_model
from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward, token_batch
from weft.models.llama3 import config as llama3
from weft.run.world import World
from weft.train.build import build_model
from weft.train.optim import make_optimizer
from weft.train.step import TrainStep

Step = Callable[[], float]
"""One training step; returns the mean loss over all ranks."""

SEED = 1
CLIP = 1.0
OPTIM = OptimConfig(lr=1e-4, weight_decay=0.0)


@dataclass(frozen=True)
class Size:
    """A model, the batch of one step over all ranks, and the number of steps of a turn."""

    config: llama3.Config
    sequences: int
    seq_len: int
    steps: int

    def __str__(self) -> str:
        config = self.config
        return f"{config.layers} layers of {config.dim}, {self.sequences} x {self.seq_len} tokens a step"

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.sequences * self.seq_len


def join_torch_world(store_file: str, world: World) -> None:
    """Join torch's own default process group, over gloo; the ranks meet in a file."""
    store = dist.FileStore(store_file, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def _llama(
    layers: int,
    dim: int,
    ffn: int,
    heads: int,
) -> llama3.Config:
    return llama3.Config(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        vocab=256,
    )


SMALL = _llama(layers=6, dim=384, ffn=1024, heads=6)
"""10.8 M parameters: matrix products take most of the time."""

TINY = _llama(layers=4, dim=64, ffn=176, heads=2)
"""0.2 M parameters: overhead outside of matrix products takes most of the time."""


@dataclass(frozen=True)
class Training:
    """One comparison on one rank. `comm` is weft's; torch.distributed has its own process group of the same ranks."""

    size: Size
    comm: Comm

    @property
    def batch(self) -> Batch:
        """The global batch, the same every step."""
        size = self.size
        shape = (size.sequences, size.seq_len + 1)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, size.config.vocab, shape, generator=generator)
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        return token_batch(inputs, targets)

    @property
    def local_rows(self) -> Batch:
        """This rank's sequences under data parallelism."""
        num_rows = self.size.sequences // self.comm.mesh.size
        start = self.comm.rank * num_rows
        stop = start + num_rows
        return self.batch.rows(slice(start, stop))

    def columns(self, rank: int) -> Batch:
        """The positions of all sequences that `rank` holds under context parallelism."""
        return self.batch.columns(index=rank, degree=self.comm.mesh.size)

    def plain_blocks(self) -> dict[str, nn.Module]:
        """The blocks on one device with their initial values, for torch's wrappers."""
        return plain_model(
            FAMILIES["llama3"],
            self.size.config,
            seed=SEED,
            dtype=torch.float32,
        )

    def weft_step(
        self,
        *,
        micro_size: int,
        chunks: int = 1,
        **fields: Any,
    ) -> Step:
        """A step of weft's trainer under a plan with `fields` and micro-batches of `micro_size` sequences a rank."""
        plan = self._plan(micro_size, chunks, fields)
        plan.check()
        model = build_model(FAMILIES["llama3"], self.size.config, plan, self.comm, seed=SEED)
        train_step = TrainStep(model, make_optimizer=_weft_adamw, clip=CLIP)
        local_batches = micro_batches(self.batch, plan, self.comm.rank)
        return lambda: train_step(local_batches, lr=OPTIM.lr).loss

    def _plan(
        self,
        micro_size: int,
        chunks: int,
        fields: Mapping[str, Any],
    ) -> Plan:
        size = self.size
        mesh = self.comm.mesh
        num_stages = mesh.degree("pp") * chunks
        sequences_per_replica = size.sequences // mesh.degree("dp")
        return Plan(
            mesh=mesh,
            family="llama3",
            architecture=canonical_json(size.config.model_dump()),
            stages=make_stages(size.config.block_specs(size.seq_len), num_stages),
            chunks=chunks,
            microbatches=sequences_per_replica // micro_size,
            micro_size=micro_size,
            seq_len=size.seq_len,
            clip=CLIP,
            **fields,
        )


class PlainModel(nn.Module):
    """The blocks of one device as one module: the mean loss of a batch."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, batch: Batch) -> Tensor:
        return forward(self.blocks, batch) / batch.num_targets()


def _weft_adamw(tensors: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return make_optimizer(tensors, OPTIM)


ADAMW: dict[str, Any] = {
    "lr": OPTIM.lr,
    "betas": OPTIM.betas,
    "eps": OPTIM.eps,
    "weight_decay": OPTIM.weight_decay,
    "fused": True,
}
"""The same hyperparameters for torch's AdamW, with its fastest kernel."""


def torch_adamw(*groups: Iterable[Tensor]) -> torch.optim.AdamW:
    """torch's AdamW; DTensors and plain tensors must be in different groups."""
    param_groups = [{"params": list(group)} for group in groups]
    return torch.optim.AdamW(param_groups, **ADAMW)


def torch_step(
    training: Training,
    net: nn.Module,
    local_batch: Batch,
    *,
    optimizer: torch.optim.Optimizer,
    before_update: Callable[[], object],
) -> Step:
    """A step of a plain training loop; `before_update` runs between backward and `optimizer.step`.

    The loss is all-reduced, as a trainer that logs it does.
    """

    def step() -> float:
        optimizer.zero_grad()
        loss = net(local_batch)
        loss.backward()
        before_update()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / training.comm.mesh.size

    return step


def clip_gradients(net: nn.Module) -> None:
    """torch's clipping of the gradient norm, at the limit of all comparisons."""
    nn.utils.clip_grad_norm_(net.parameters(), CLIP)
