"""Seconds that the host takes for each kernel of a real training step: Python, dispatch, autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware
from weft.config.load import load
from weft.core.mesh import Mesh
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import example_batch
from weft.planner.measure.roles import measure
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import step_time
from weft.train.build import build_configured_step

MESH = "dp1"
WORDS = (
    *("--mesh", MESH, "--model.name", "llama3", "--model.layers", "4", "--model.dim", "32"),
    *("--model.heads", "2", "--model.kv_heads", "1", "--model.ffn", "64", "--compile", "off"),
    *("--data.seq_len", "8", "--batch.global_size", "4"),
)
"""A model whose kernels have next to nothing to do."""
LAUNCH_ALONE = Efficiency(gemm=1e9, attention=1e9, memory=1e9, launch_s=1.0)
"""Kernels take one second each, however much they do."""
LR = 1e-4


def tiny_step(device: torch.device) -> tuple[Callable[[], object], int]:
    """A step of a tiny model on this rank alone, and how many launches it is predicted to be."""
    run = MeasuredRun.of(load(WORDS, FAMILIES))
    speeds = Speeds(find_hardware("h100").with_efficiency(LAUNCH_ALONE))
    num_launches = round(step_time(measure(run), speeds).total_s)
    transport = ThreadWorld(1, devices=(device,)).transport(0)
    comm = Comm(Mesh.parse(MESH), 0, transport)
    step = build_configured_step(run.config, run.plan, comm)
    batch = example_batch(run, comm).map(
        lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    )
    batches = [batch] * run.plan.microbatches
    return (lambda: step(batches, lr=LR)), num_launches
