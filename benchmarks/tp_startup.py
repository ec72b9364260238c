"""CPU time of `parallelize` on the meta device under tp2: the rank thread that traces the model, and the ones after it.

python -m benchmarks.tp_startup
"""

from __future__ import annotations

import time

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, make_stages
from weft.models import FAMILIES
from weft.parallel.model.parallelize import parallelize
from weft.train.init_from import meta_modules

FAMILY = FAMILIES["llama3"]
SEQ_LEN = 64
REPEATS = 5


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


def main() -> None:
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


if __name__ == "__main__":
    main()
