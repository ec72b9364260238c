"""Tokens/s of weft and of torch, in turns in the same processes: one rank against a plain loop, dp2 against DDP.

    python -m benchmarks.throughput [--layers 6 --dim 256 --vocab 4096 --seq-len 256 --sequences 8 --rounds 8] [--ranks 1 2]

Both train the same model from the same initial values on the same tokens with the same optimizer kernel. Printed are the
median step time of each, and the median of the ratios of neighbouring turns (A B A B ...), since machines drift.
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
from benchmarks.rivals.training import PlainModel, join_torch_world
from torch import nn

from tests.one_device import micro_batches, plain_model
from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import Batch, token_batch
from weft.models.llama3 import config as llama3
from weft.run.launch import launch
from weft.run.rank_setup import open_comm
from weft.run.world import World
from weft.train.build import build_model
from weft.train.optim import make_optimizer
from weft.train.step import TrainStep

STEPS_PER_TURN = 3
NUM_RANKS = (1, 2)
HEAD_SIZE = 64
SEED = 1
CLIP = 1.0
LR = 1e-3

Step = Callable[[], object]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    parser.add_argument("--dim", type=int, default=256, help="width of the model")
    parser.add_argument("--vocab", type=int, default=4096, help="entries of the vocabulary")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of a step on each rank")
    parser.add_argument("--rounds", type=int, default=8, help="timed turns of each side")
    parser.add_argument("--ranks", type=int, nargs="+", default=NUM_RANKS, help="numbers of ranks")
    return parser.parse_args()


def model_config(args: argparse.Namespace) -> llama3.Config:
    heads = args.dim // HEAD_SIZE
    return llama3.Config(
        layers=args.layers,
        dim=args.dim,
        heads=heads,
        kv_heads=heads,
        ffn=4 * args.dim,
        vocab=args.vocab,
    )


def global_batch(args: argparse.Namespace, num_ranks: int) -> Batch:
    num_sequences = args.sequences * num_ranks
    shape = (num_sequences, args.seq_len + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, args.vocab, shape, generator=generator)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    return token_batch(inputs, targets)


def make_mesh(num_ranks: int) -> Mesh:
    text = f"dp{num_ranks}" if num_ranks > 1 else ""
    return Mesh.parse(text)


def torch_step(args: argparse.Namespace, world: World) -> Step:
    """A plain training loop, with DistributedDataParallel on several ranks."""
    blocks = plain_model(FAMILIES["llama3"], model_config(args), seed=SEED, dtype=torch.float32)
    net: nn.Module = PlainModel(blocks)
    if world.size > 1:
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    first_row = world.rank * args.sequences
    local_rows = slice(first_row, first_row + args.sequences)
    local_batch = global_batch(args, world.size).rows(local_rows)

    def step() -> float:
        optimizer.zero_grad()
        loss = net(local_batch)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def weft_step(args: argparse.Namespace, world: World, comm: Comm) -> Step:
    """weft's trainer on the same batch."""
    config = model_config(args)
    plan = Plan(
        mesh=make_mesh(world.size),
        family="llama3",
        architecture=canonical_json(config.model_dump()),
        stages=make_stages(config.block_specs(args.seq_len), 1),
        micro_size=args.sequences,
        seq_len=args.seq_len,
        clip=CLIP,
    )
    model = build_model(FAMILIES["llama3"], config, plan, comm, seed=SEED)
    train_step = TrainStep(
        model, make_optimizer=lambda tensors: make_optimizer(tensors, OptimConfig()), clip=CLIP
    )
    batch = global_batch(args, world.size)
    local_batches = micro_batches(batch, plan, world.rank)
    return lambda: train_step(local_batches, lr=LR)


def compare(args: argparse.Namespace, folder: str, world: World) -> None:
    """Time both sides on this rank; rank 0 prints the result."""
    if world.size > 1:
        join_torch_world(f"{folder}/torch{world.size}", world)
    with open_comm(world, make_mesh(world.size), torch.device("cpu")) as comm:
        comm.checked = False
        steps = {"torch": torch_step(args, world), "weft": weft_step(args, world, comm)}
        step_s = time_in_turns(steps, comm, args.rounds)
    if world.rank == 0:
        print_result(args, world.size, torch_s=step_s["torch"], weft_s=step_s["weft"])
    if world.size > 1:
        dist.destroy_process_group()


def time_in_turns(steps: dict[str, Step], comm: Comm, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of every measured turn."""
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        is_warm_up = round_number == 0
        for name, step in steps.items():
            seconds = time_turn(step, comm)
            if not is_warm_up:
                step_s[name].append(seconds)
    return step_s


def time_turn(step: Step, comm: Comm) -> float:
    """Seconds a step of one turn."""
    comm.barrier("dp")
    start = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        step()
    return (time.perf_counter() - start) / STEPS_PER_TURN


def print_result(
    args: argparse.Namespace, num_ranks: int, *, torch_s: list[float], weft_s: list[float]
) -> None:
    tokens = args.sequences * args.seq_len * num_ranks
    title = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    torch_name = "plain loop" if num_ranks == 1 else "torch DDP"
    ratios = []
    for torch_turn_s, weft_turn_s in zip(torch_s, weft_s, strict=True):
        ratios.append(torch_turn_s / weft_turn_s)
    columns = [
        speed_text(torch_name, tokens, statistics.median(torch_s)),
        speed_text("weft", tokens, statistics.median(weft_s)),
        f"weft/torch {statistics.median(ratios):.3f} (median of {args.rounds} rounds)",
    ]
    print(f"{title}: {', '.join(columns)}")


def speed_text(name: str, tokens: int, step_s: float) -> str:
    """`weft 5,259 tokens/s (6.1 ms)`."""
    return f"{name} {tokens / step_s:,.0f} tokens/s ({step_s * 1e3:.1f} ms)"


def main() -> None:
    args = arguments()
    print(
        f"llama3 {args.layers} layers x {args.dim}, {args.sequences} x {args.seq_len} tokens a rank, float32, CPU, measured"
    )
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            launch(partial(compare, args, folder), num_ranks, device="cpu")


if __name__ == "__main__":
    main()
