"""Tokens/s of weft against torch's own, turn by turn in the same processes: one rank against a plain loop, dp2 against DDP.

    python benchmarks/throughput.py [--layers 6 --dim 256 --seq-len 256 --sequences 8 --rounds 8]

Both sides train the same model from the same values on the same tokens with the same optimizer kernel; the table gives the
median time of a step of each, and the median of the ratios of neighbouring rounds (A B A B ...), since machines drift.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from torch import nn

from weft.config.schema import OptimConfig
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward, token_batch
from weft.models.llama3 import config as llama3
from weft.prove.layout import micro_batches
from weft.prove.oracle import plain_model
from weft.run.launch import launch
from weft.run.rank_setup import open_comm
from weft.run.world import World
from weft.train.build import build_model
from weft.train.optim import make_optimizer
from weft.train.step import TrainStep

STEPS_A_ROUND = 3
CLIP = 1.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 6), ("dim", 256), ("seq-len", 256), ("sequences", 8), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def config(args: argparse.Namespace) -> llama3.Config:
    return llama3.Config(
        layers=args.layers, dim=args.dim, heads=args.dim // 64, kv_heads=args.dim // 64, ffn=4 * args.dim, vocab=4096
    )


def batch_of(args: argparse.Namespace, ranks: int) -> Batch:
    tokens = torch.randint(
        0, 4096, (args.sequences * ranks, args.seq_len + 1), generator=torch.Generator().manual_seed(0)
    )
    return token_batch(tokens[:, :-1], tokens[:, 1:])


class Chain(nn.Module):
    """The plain blocks as one module, for torch's own wrappers."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, batch: Batch) -> torch.Tensor:
        return forward(self.blocks, batch) / batch.num_targets()


def torchs_step(args: argparse.Namespace, world: World) -> Callable[[], object]:
    """A plain loop; wrapped in torch's DDP where there are several ranks."""
    net: nn.Module = Chain(plain_model(FAMILIES["llama3"], config(args), seed=1, dtype=torch.float32))
    if world.size > 1:
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    mine = batch_of(args, world.size).rows(slice(world.rank * args.sequences, (world.rank + 1) * args.sequences))

    def step() -> float:
        optimizer.zero_grad()
        loss = net(mine)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def wefts_step(args: argparse.Namespace, world: World, comm: object) -> Callable[[], object]:
    model_config = config(args)
    plan = Plan(
        mesh=Mesh.parse(f"dp{world.size}" if world.size > 1 else ""),
        family="llama3",
        architecture=canonical_json(model_config.model_dump()),
        stages=make_stages(model_config.block_specs(args.seq_len), 1),
        micro_size=args.sequences,
        seq_len=args.seq_len,
        clip=CLIP,
    )
    model = build_model(FAMILIES["llama3"], model_config, plan, comm, seed=1)
    train = TrainStep(model, make_optimizer=lambda tensors: make_optimizer(tensors, OptimConfig()), clip=CLIP)
    mine = micro_batches(batch_of(args, world.size), plan, world.rank)
    return lambda: train(mine, lr=1e-3)


def race(args: argparse.Namespace, folder: str, world: World) -> None:
    mesh = Mesh.parse(f"dp{world.size}" if world.size > 1 else "")
    if world.size > 1:
        store = dist.FileStore(f"{folder}/torch{world.size}", world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    with open_comm(world, mesh, torch.device("cpu")) as comm:
        comm.checked = False
        sides = {"torch": torchs_step(args, world), "weft": wefts_step(args, world, comm)}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            for name, step in sides.items():
                comm.barrier("dp")
                start = time.perf_counter()
                for _ in range(STEPS_A_ROUND):
                    step()
                if number:  # the first round warms up
                    times[name].append((time.perf_counter() - start) / STEPS_A_ROUND)
    if world.rank == 0:
        report(args, world.size, times)
    if world.size > 1:
        dist.destroy_process_group()


def report(args: argparse.Namespace, ranks: int, times: dict[str, list[float]]) -> None:
    tokens = args.sequences * args.seq_len * ranks
    ratio = statistics.median(a / b for a, b in zip(times["torch"], times["weft"], strict=True))
    rival = "torch DDP" if ranks > 1 else "plain loop"
    theirs, ours = (statistics.median(times[name]) for name in ("torch", "weft"))
    print(
        f"{ranks} rank{'s' * (ranks > 1)}: {rival} {tokens / theirs:,.0f} tokens/s ({theirs * 1e3:.1f} ms), "
        f"weft {tokens / ours:,.0f} tokens/s ({ours * 1e3:.1f} ms), weft/torch {ratio:.3f} (median of {args.rounds} rounds)"
    )


def main() -> None:
    args = arguments()
    print(f"llama3 {args.layers} layers x {args.dim}, {args.sequences} x {args.seq_len} tokens a rank, float32, CPU")
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            launch(partial(race, args, folder), ranks, device="cpu")


if __name__ == "__main__":
    main()
