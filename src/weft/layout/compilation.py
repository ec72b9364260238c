"""Compiled blocks: in which layouts torch.compile may compile the forward and backward of each block. Pure functions.

Note [What is compiled]
    The forward of each block between the embedding and the head, as autograd differentiates it: one
    graph for all blocks of one kind. What weft puts around a block (its hooks, full recomputation,
    gathering and freeing of parameters, sums of gradients, messages of a pipeline) stays as it is.

    Of what is inside:

        collectives of tp        operators of the graph, in the order of the forward: Note [Collectives in
                                 compiled code] in comm/compiled_calls.py. Weight gradients are not
                                 computed while the gradient of a region's input is reduced
        selective recomputation  the compiler saves no result that fused operations yield from saved
                                 ones; its backward computes them again
        attention along cp,      run between compiled parts, as do attention in blocks of queries, and
        dispatch to experts      embeddings and losses of a sharded vocabulary: what they do depends on the
                                 values of a batch, or they compute while they wait
        rotary angles            are computed before, once for all layers

    Schedules that split a backward in two, and layouts with `tp_overlap`, run without compilation; so do
    blocks that update buffers, whose values are recorded by Python code, and blocks with dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from weft.errors import Fault

Compile = Literal["off", "auto", "blocks"]
KEY = "compile"
NOT_COMPILED = ("embed", "head", "loss")
"""Blocks of one or two operations, or with a loss that goes through the tokens chunk by chunk, of which
softmax and gradient are compiled (models/common/head_output.py).
"""
OFF = "--compile off"


def compile_faults(*, splits_backward: bool, schedule: str, tp_overlap: bool) -> Iterator[Fault]:
    """Why the blocks of a layout cannot be compiled.

    Args:
        splits_backward: whether the schedule computes gradients of inputs and of weights apart.
        tp_overlap: whether parts of the sequence are sent while others are multiplied.
    """
    if tp_overlap:
        yield Fault(
            KEY,
            "parallel.tp_overlap sends parts of the sequence between products",
            got="blocks",
            need="off",
            fix=f"{OFF}, or --parallel.tp_overlap False",
        )
    if splits_backward:
        yield Fault(
            KEY,
            f"{schedule} splits the backward of each block in two",
            got="blocks",
            need="off",
            fix=f"{OFF}, or --pipeline.schedule 1f1b or interleaved",
        )
