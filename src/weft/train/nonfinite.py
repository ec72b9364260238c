"""Find where NaN or infinity first appears in a step: block, rank and micro-batches, in the order of computation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm.text import all_gather_text
from weft.core.mesh import Mesh
from weft.layout.plan import Plan
from weft.models.common.batch import Batch
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import ForwardPlayer
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.schedule.actions import Act

BlocksFound = dict[str, list[int]]
"""Block -> micro-batches for which it had a value that is not finite; none listed for gradients."""


@dataclass(frozen=True)
class NonFiniteValue:
    """The first non-finite value of a step.

    Attributes:
        place: output or gradient of a block; "loss" if a rank had a non-finite part of the loss and
            its forward is finite when it is repeated; "sum" if all are finite and their sum is not.
        block: its name; "" for a loss or sum.
        rank: the first rank that has it; None for a sum.
        coordinates: of that rank in the mesh; "" in a mesh of one.
        others: further ranks that have it: of a gradient those over which it was reduced, of a loss
            those that hold copies. Any of them may be the cause.
        micro_batches: of that rank, whose output is not finite; () for a gradient, which is a sum
            over micro-batches.
    """

    place: Literal["output", "gradient", "loss", "sum"]
    block: str = ""
    rank: int | None = None
    coordinates: str = ""
    others: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.place == "sum":
            return "all outputs and gradients are finite: their sum overflows"
        if self.others:
            rank = f"one of ranks {' '.join(map(str, (self.rank, *self.others)))}"
        elif self.coordinates:
            rank = f"rank {self.rank} ({self.coordinates})"
        else:
            rank = f"rank {self.rank}"
        if self.place == "loss":
            return (
                f"in the loss of {rank}; its forward is finite when it is repeated: it arose once"
            )
        return f"first in the {self.place} of block {self.block!r} on {rank}"


def locate(
    model: ParallelModel, grads: GradientReducer, batches: Sequence[Batch], *, loss: Tensor
) -> NonFiniteValue:
    """The first non-finite value of a step; every rank must call it before the update.

    Runs the forward again to look at the output of every block, then looks at the loss of the step,
    and at the gradients, which are computed from the last block to the first.

    Args:
        loss: this rank's part of the loss in the step.
    """
    activation_blocks = _blocks_with_nonfinite_output(model, batches)
    gradient_blocks = _blocks_with_nonfinite_gradient(grads)
    local = {"activation": activation_blocks, "gradient": gradient_blocks}
    if not _is_finite(loss):
        local["loss"] = {"": []}
    texts = all_gather_text(model.comm, json.dumps(local))
    reports = [json.loads(text) for text in texts]
    return _first(reports, model.plan, model.comm.mesh)


def _first(reports: Sequence[Mapping[str, BlocksFound]], plan: Plan, mesh: Mesh) -> NonFiniteValue:
    forward_order = [name for stage in plan.stages for name in stage.blocks]
    backward_order = list(reversed(forward_order))
    for block in forward_order:
        for rank, report in enumerate(reports):
            micro_batches = report["activation"].get(block)
            if micro_batches is not None:
                coordinates = _coordinates(rank, mesh)
                return NonFiniteValue(
                    place="output",
                    block=block,
                    rank=rank,
                    coordinates=coordinates,
                    micro_batches=tuple(micro_batches),
                )
    with_loss = [rank for rank, report in enumerate(reports) if "loss" in report]
    if with_loss:
        return _shared(with_loss, mesh, place="loss")
    for block in backward_order:
        ranks = [rank for rank, report in enumerate(reports) if block in report["gradient"]]
        if ranks:
            return _shared(ranks, mesh, place="gradient", block=block)
    return NonFiniteValue("sum")


def _shared(
    ranks: Sequence[int], mesh: Mesh, *, place: Literal["gradient", "loss"], block: str = ""
) -> NonFiniteValue:
    """A value that several ranks have."""
    first, *others = ranks
    return NonFiniteValue(
        place=place,
        block=block,
        rank=first,
        coordinates=_coordinates(first, mesh),
        others=tuple(others),
    )


def _coordinates(rank: int, mesh: Mesh) -> str:
    if mesh.size > 1:
        return mesh.coord_text(rank)
    return ""


def _blocks_with_nonfinite_output(model: ParallelModel, batches: Sequence[Batch]) -> BlocksFound:
    found_now: set[str] = set()
    found: BlocksFound = {}

    def after_action(act: Act) -> None:
        for name in sorted(found_now):
            found.setdefault(name, []).append(act.mb)
        found_now.clear()

    with _watching_outputs(model.blocks, found_now):
        # The values of the step are freed or overwritten by now, so its forward runs again; all ranks
        # take part in its messages.
        ForwardPlayer(model, on_action=after_action).loss(batches)
    return found


@contextmanager
def _watching_outputs(blocks: Mapping[str, nn.Module], found: set[str]) -> Iterator[None]:
    """While open, add the name of every block that returns a non-finite tensor to `found`."""

    def hook_of(name: str) -> Any:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if isinstance(output, tuple):
                tensors = output
            else:
                tensors = (output,)
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


def _blocks_with_nonfinite_gradient(grads: GradientReducer) -> BlocksFound:
    found: BlocksFound = {}
    for name, param in grads.sharded_params.items():
        if param.grad is not None and not _is_finite(param.grad):
            block, _, _ = name.partition(".")
            found[block] = []
    return found


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
