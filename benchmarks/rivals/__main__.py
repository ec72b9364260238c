"""Tokens/s of weft and of torch for each strategy: real processes over gloo, same model, batch, dtype and threads.

    OMP_NUM_THREADS=1 python -m benchmarks.rivals [--size small tiny] [--only "zero 3" ...] [--rounds 8]

A ratio is torch's time / weft's, so above 1 weft is faster: the median over pairs of neighbouring turns, in brackets the
first and third quartile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from benchmarks.rivals import accelerated, context, fsdp, pipeline, tensor
from benchmarks.rivals.timing import format_report, time_in_turns
from benchmarks.rivals.training import SMALL, TINY, Size, Training, join_torch_world

from weft.core.mesh import Mesh
from weft.run.launch import launch
from weft.run.rank_setup import open_comm
from weft.run.world import World

NUM_RANKS = 2
SIZES = {
    "small": {
        "": Size(SMALL, sequences=4, seq_len=256, steps=2),
        "pp2": Size(SMALL, sequences=8, seq_len=256, steps=1),
        "cp2": Size(SMALL, sequences=1, seq_len=1024, steps=2),
    },
    "tiny": {
        "": Size(TINY, sequences=8, seq_len=64, steps=10),
        "pp2": Size(TINY, sequences=16, seq_len=64, steps=5),
        "cp2": Size(TINY, sequences=4, seq_len=128, steps=10),
    },
}
"""Model and batch by size and mesh; "" is for the meshes that are not listed."""

MODULES = (fsdp, pipeline, context, tensor, accelerated)
MESHES = {name: module.MESH for module in MODULES for name in module.COMPARISONS}
COMPARISONS = {
    name: comparison for module in MODULES for name, comparison in module.COMPARISONS.items()
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", nargs="+", choices=SIZES, default=list(SIZES), help="sizes of the model"
    )
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=8, help="timed turns of each side")
    return parser.parse_args()


def compare(name: str, size_name: str, rounds: int, folder: str, world: World) -> None:
    """Run one comparison on this rank; rank 0 prints its result."""
    mesh = MESHES[name]
    sizes = SIZES[size_name]
    size = sizes.get(mesh, sizes[""])
    join_torch_world(f"{folder}/torch", world)
    with open_comm(world, Mesh.parse(mesh), torch.device("cpu")) as comm:
        comm.checked = False
        steps = COMPARISONS[name](Training(size, comm))
        timings = time_in_turns(steps, comm, rounds=rounds, steps_per_turn=size.steps)
    if world.rank == 0:
        print(format_report(name, size.tokens, timings), flush=True)
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    for size_name in args.size:
        print_title(size_name)
        for name in args.only:
            with tempfile.TemporaryDirectory() as folder:
                rank_main = partial(compare, name, size_name, args.rounds, folder)
                launch(rank_main, NUM_RANKS, device="cpu")


def print_title(size_name: str) -> None:
    sizes = []
    for mesh, size in SIZES[size_name].items():
        mesh_name = mesh or "other meshes"
        sizes.append(f"{mesh_name}: {size}")
    print(
        f"{size_name}, llama3, float32, {NUM_RANKS} ranks, measured. {'; '.join(sizes)}", flush=True
    )


if __name__ == "__main__":
    main()
