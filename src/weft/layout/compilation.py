"""Compiled blocks: in which layouts torch.compile may compile the forward and backward of each block. Pure functions.

Note [What is compiled]
    The forward of each block between the embedding and the head, as autograd differentiates it: one
    graph for all blocks of one kind. What weft puts around a block (recomputation, gathering and
    freeing of parameters, sums of gradients, messages of a pipeline) stays as it is. So the axes
    whose transforms change the inside of a block, selective recomputation, which looks at each of
    its operations, and schedules that split its backward in two run without compilation; so do
    blocks that update buffers, whose values are recorded by Python code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from weft.core.dimension import block_axes
from weft.core.mesh import Mesh
from weft.errors import Fault

Compile = Literal["off", "auto", "blocks"]
KEY = "compile"
NOT_COMPILED = ("embed", "head", "loss")
"""Blocks of one or two operations, or with a loss that goes through the tokens chunk by chunk, of which
softmax and gradient are compiled (models/common/head_output.py).
"""
OFF = "--compile off"


def compile_faults(
    mesh: Mesh, *, recompute: Collection[str], splits_backward: bool, schedule: str
) -> Iterator[Fault]:
    """Why the blocks of a layout cannot be compiled.

    Args:
        recompute: modes of recomputation of layers.
        splits_backward: whether the schedule computes gradients of inputs and of weights apart.
    """
    inside = [axis for axis in mesh.wide_axes if axis in block_axes()]
    if inside:
        yield Fault(
            KEY,
            f"blocks that communicate inside, along {' and '.join(inside)}, are not compiled",
            got="blocks",
            need="off",
            fix=f"{OFF}, or a mesh without {' and '.join(inside)}",
        )
    if "selective" in recompute:
        yield Fault(
            KEY,
            "selective recomputation looks at each operation of a block",
            got="blocks",
            need="off",
            fix=f"{OFF}, or --parallel.recompute full or none",
        )
    if splits_backward:
        yield Fault(
            KEY,
            f"{schedule} splits the backward of each block in two",
            got="blocks",
            need="off",
            fix=f"{OFF}, or --pipeline.schedule 1f1b or interleaved",
        )
