"""CPU time of `parallelize` on the meta device: rank threads under tp2, and one rank of large models.

python -m benchmarks.tp_startup [threads | large]

`threads`: the rank thread that traces the model, and the ones after it. `large`: building all blocks
against building the blocks of the rank's stages, with the memory of Python objects.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.comm.transport import MetaTransport
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, make_stages
from weft.models import FAMILIES, PRESETS
from weft.parallel.model.parallelize import parallelize
from weft.train.init_from import lazy_blocks, meta_modules

FAMILY = FAMILIES["llama3"]
SEQ_LEN = 64
REPEATS = 5
LARGE = (
    ("llama3-405b", "pp16 dp128 tp8"),
    ("llama3-405b", "pp16 dp128"),
    ("llama3-70b", "pp4 dp8 tp8"),
    ("llama3-70b", "pp4 dp8"),
)
Blocks = Mapping[str, nn.Module]


def times_ms(mesh: str, *, layers: int, sequence_parallel: bool) -> list[float]:
    """CPU milliseconds of `parallelize` on each rank, one rank after the other."""
    config = FAMILY.Config(layers=layers)
    plan = Plan(
        mesh=Mesh.parse(mesh),
        family="llama3",
        architecture="{}",
        stages=make_stages(config.block_specs(SEQ_LEN), 1),
        seq_len=SEQ_LEN,
        sequence_parallel=sequence_parallel,
    )
    world = ThreadWorld(plan.mesh.size)
    times = []
    for rank in range(plan.mesh.size):
        comm = Comm(plan.mesh, rank, world.transport(rank))
        blocks = meta_modules(lambda: FAMILY.blocks(config))
        start = time.process_time()
        parallelize(blocks, plan, comm, axes=FAMILY.AXES, ties=FAMILY.ties(config))
        times.append((time.process_time() - start) * 1e3)
    return times


def best_ms(mesh: str, *, layers: int, sequence_parallel: bool = False) -> list[float]:
    """The smallest of several measurements, for each rank."""
    runs = []
    for _ in range(REPEATS):
        runs.append(times_ms(mesh, layers=layers, sequence_parallel=sequence_parallel))
    return [min(of_rank) for of_rank in zip(*runs, strict=True)]


def build_rank(preset: str, mesh: str, make: Callable[[], Blocks]) -> None:
    """The model of rank 0, without parameters."""
    config = PRESETS[preset]
    parsed = Mesh.parse(mesh)
    plan = Plan(
        mesh=parsed,
        family=config.family,
        architecture="{}",
        stages=make_stages(config.block_specs(SEQ_LEN), parsed.degree("pp")),
        seq_len=SEQ_LEN,
        microbatches=32,
    )
    transport = MetaTransport(parsed.size, 0, device="cpu")
    comm = Comm(parsed, 0, transport)
    parallelize(make(), plan, comm, axes=FAMILY.AXES, ties=FAMILY.ties(config))


def cost_of(preset: str, mesh: str, make: Callable[[], Blocks]) -> str:
    """Smallest CPU time of several builds, and the peak of Python memory of one."""
    times_s = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        build_rank(preset, mesh, make)
        times_s.append(time.process_time() - start_s)
    tracemalloc.start()
    build_rank(preset, mesh, make)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    fastest_ms = 1e3 * min(times_s)
    peak_mib = peak_bytes / 2**20
    return f"{fastest_ms:.0f} ms, {peak_mib:.1f} MiB"


def print_large() -> None:
    """Print a line for each large model."""
    build_rank("llama3-8b", "tp2", lambda: lazy_blocks(FAMILY, PRESETS["llama3-8b"]))
    print("| model | mesh | all blocks | blocks of the rank |")
    print("|---|---|---|---|")
    for preset, mesh in LARGE:
        config = PRESETS[preset]
        make_blocks = partial(FAMILY.blocks, config)
        whole = cost_of(preset, mesh, partial(meta_modules, make_blocks))
        make = partial(lazy_blocks, FAMILY, config)
        lazy = cost_of(preset, mesh, make)
        print(f"| {preset} | {mesh} | {whole} | {lazy} |", flush=True)


def print_threads() -> None:
    """Print a line for each number of layers."""
    times_ms("tp2", layers=4, sequence_parallel=True)
    for layers in (4, 32, 100):
        whole, _ = best_ms("dp2", layers=layers)
        for sequence_parallel in (False, True):
            first, second = best_ms("tp2", layers=layers, sequence_parallel=sequence_parallel)
            words = ", sequence parallel" if sequence_parallel else ""
            print(
                f"{layers} layers{words}: {first:.0f} ms, second rank {second:.0f}; dp2 {whole:.0f}"
            )


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=["threads", "large"], nargs="?", default="threads")
    if parser.parse_args().what == "large":
        print_large()
    else:
        print_threads()


if __name__ == "__main__":
    main()
