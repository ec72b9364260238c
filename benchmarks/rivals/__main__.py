"""Tokens/s of weft against torch's own for each strategy: real processes over gloo, same model, batch, dtype, threads.

    OMP_NUM_THREADS=1 python -m benchmarks.rivals [--size small tiny] [--only "zero 3" ...] [--rounds 8]

A ratio above 1 says that weft is faster; in brackets the quarters of the pairs below and above.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from benchmarks.rivals import context, fsdp, pipeline, tensor
from benchmarks.rivals.course import SMALL, TINY, Course, Size
from benchmarks.rivals.race import race, report

from weft.core.mesh import Mesh
from weft.run.launch import launch
from weft.run.rank_setup import open_comm
from weft.run.world import World

SIZES = {
    "small": {"": Size(SMALL, 4, 256, 2), "pp2": Size(SMALL, 8, 256, 1), "cp2": Size(SMALL, 1, 1024, 2)},
    "tiny": {"": Size(TINY, 8, 64, 10), "pp2": Size(TINY, 16, 64, 5), "cp2": Size(TINY, 4, 128, 10)},
}
"""What is trained, by size and mesh; "" for the meshes that are not named."""

LINES = {
    name: (family.MESH, line) for family in (fsdp, pipeline, context, tensor) for name, line in family.LINES.items()
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


def run_line(name: str, size: str, rounds: int, folder: str, world: World) -> None:
    mesh, sides_of = LINES[name]
    store = dist.FileStore(f"{folder}/torch", world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    course_size = SIZES[size].get(mesh, SIZES[size][""])
    with open_comm(world, Mesh.parse(mesh), torch.device("cpu")) as comm:
        comm.checked = False
        sides = sides_of(Course(course_size, comm))
        laps = race(sides, comm, rounds=rounds, steps=course_size.steps)
    if world.rank == 0:
        print(report(name, course_size.tokens, laps), flush=True)
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    for size in args.size:
        told = "; ".join(f"{mesh or 'else'}: {what}" for mesh, what in SIZES[size].items())
        print(f"{size}, llama3, float32, 2 ranks. {told}", flush=True)
        for name in args.only:
            with tempfile.TemporaryDirectory() as folder:
                launch(partial(run_line, name, size, args.rounds, folder), 2, device="cpu")


if __name__ == "__main__":
    main()
