"""Find where NaN or infinity first appears in a step: the block and the rank, in the order of computation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.text import all_gather_text
from weft.core.mesh import Mesh
from weft.layout.plan import Plan
from weft.models.common.batch import Batch
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import ForwardPlayer
from weft.parallel.zero.gradient_reducer import GradientReducer


def locate(model: ParallelModel, grads: GradientReducer, batches: Sequence[Batch]) -> str:
    """Where the first non-finite value of a step is, for an error message; every rank must call it
    before the update.

    Runs the forward again to look at the output of every block, then looks at the gradients, which
    are computed from the last block to the first.
    """
    activation_blocks = _blocks_with_nonfinite_output(model, batches)
    gradient_blocks = _blocks_with_nonfinite_gradient(grads)
    local = {"activation": sorted(activation_blocks), "gradient": sorted(gradient_blocks)}
    reports = [json.loads(text) for text in all_gather_text(model.comm, json.dumps(local))]
    return _describe(reports, model.plan, model.comm.mesh)


def _describe(reports: Sequence[Mapping[str, Sequence[str]]], plan: Plan, mesh: Mesh) -> str:
    forward_order = [name for stage in plan.stages for name in stage.blocks]
    in_order_of_computation = (
        ("activation", "output", forward_order),
        ("gradient", "gradient", list(reversed(forward_order))),
    )
    for kind, noun, order in in_order_of_computation:
        for block in order:
            for rank, report in enumerate(reports):
                if block in report[kind]:
                    return f"first in the {noun} of block {block!r} on {_rank_text(rank, mesh)}"
    return "all outputs and gradients are finite: their sum overflows"


def _rank_text(rank: int, mesh: Mesh) -> str:
    return f"rank {rank} ({mesh.coord_text(rank)})" if mesh.size > 1 else "rank 0"


def _blocks_with_nonfinite_output(model: ParallelModel, batches: Sequence[Batch]) -> set[str]:
    found: set[str] = set()
    with _watching_outputs(model.blocks, found):
        ForwardPlayer(model).loss(batches)
    return found


@contextmanager
def _watching_outputs(blocks: Mapping[str, nn.Module], found: set[str]) -> Iterator[None]:
    """While open, add the name of every block that returns a non-finite tensor to `found`."""

    def hook_of(name: str) -> Any:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            for tensor in tensors:
                if isinstance(tensor, Tensor) and not _is_finite(tensor):
                    found.add(name)

        return hook

    handles = [block.register_forward_hook(hook_of(name)) for name, block in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _blocks_with_nonfinite_gradient(grads: GradientReducer) -> set[str]:
    found = set()
    for name, param in grads.sharded_params.items():
        if param.grad is not None and not _is_finite(param.grad):
            block, _, _ = name.partition(".")
            found.add(block)
    return found


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
