"""What the ranks of a run hold at least on this machine, by its config alone, and the memory that the machine has. No torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from weft.config.optimizers import uses_8_bits
from weft.config.run import Run
from weft.core.axes import data_axes, state_axes
from weft.core.dimension import local_update_axes, pipeline_axis
from weft.core.machine_memory import total_bytes
from weft.core.model_config import weight_flops
from weft.core.precision import NUM_BYTES
from weft.errors import LaunchError
from weft.parallel.ep import AXIS as EP
from weft.parallel.tp import AXIS as TP
from weft.run.world import detect

MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the limit of a container, of control groups 2 and 1."""
STATES = {"adamw": 2, "lion": 1, "muon": 1}
"""Numbers that an optimizer keeps for a parameter, at least."""
NF4_BYTES = {"nf4": 4.5 / 8, "nf4_double": 4.125 / 8}
"""Bytes of a weight in 4 bits."""
LEAST_KEPT = 8
"""Tensors of the size of a block's output that its backward needs, at least."""


def machine_bytes() -> int:
    """Memory of this machine, or of the container where that is limited."""
    found = total_bytes()
    for path in MEMORY_LIMITS:
        file = Path(path)
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdecimal():
            found = min(found, int(text))
    return found


def num_local_ranks(run: Run) -> int:
    """Ranks of a run on this machine."""
    try:
        world = detect(os.environ)
    except LaunchError:  # `world_faults` reports it
        world = None
    return run.device_mesh.size if world is None else world.local_size


@dataclass(frozen=True)
class StateBytes:
    """Bytes that all ranks of a run hold, at least: of weights in matrix products alone.

    Attributes:
        weights: parameters.
        gradients: at the end of a backward.
        optimizer: states.
    """

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer

    @staticmethod
    def of(run: Run, zero: int) -> StateBytes:
        """The bytes of states of a run with its ZeRO stage."""
        mesh = run.device_mesh
        num_weights = weight_flops(run.model, 1) / 2
        copied_along = (*local_update_axes(), *state_axes(mesh, data_axes(mesh)).replicated)
        once = num_weights * mesh.degree(copied_along)
        on_all = num_weights * mesh.size / mesh.degree((TP, pipeline_axis(), EP))
        size = NUM_BYTES[run.precision.params]
        gradient_size = min(size, NUM_BYTES[run.precision.compute])
        is_trained = not run.lora.rank
        weight_size = NF4_BYTES.get(run.lora.quantize, size)
        states = STATES.get(run.optim.name, 0)
        state_size = 1 if uses_8_bits(run.optim) else size
        return StateBytes(
            weights=weight_size * (once if zero == 3 else on_all),
            gradients=is_trained * gradient_size * (once if zero >= 2 else on_all),
            optimizer=is_trained * states * state_size * (once if zero >= 1 else on_all),
        )


def local_states(run: Run, zero: int) -> float:
    """Bytes of the states of the ranks on this machine, at least."""
    share = num_local_ranks(run) / run.device_mesh.size
    return share * StateBytes.of(run, zero).total


def local_activations(run: Run) -> float:
    """Bytes of the activations of one micro-batch of the ranks on this machine, about."""
    sizes = [block.out for block in run.model.block_specs(run.data.seq_len)]
    outputs = sum(math.prod(size for size in out if isinstance(size, int)) for out in sizes)
    of_pipeline = LEAST_KEPT * run.batch.micro_size * run.data.seq_len * outputs
    mesh = run.device_mesh
    num_pipelines = mesh.size / mesh.degree((TP, pipeline_axis()))
    share = num_local_ranks(run) / mesh.size
    return share * num_pipelines * of_pipeline * NUM_BYTES[run.precision.compute]
