"""Hooks that start the reductions of a block at the latest when the backward of the block before it begins.

Note [One order of gathers and reductions]
    A rank whose tokens do not use a parameter has no gradient for it, so its group is never complete
    there. If the reduction waited for the end of the backward, that rank would start it after the
    all-gathers of earlier blocks, and the other ranks before them: on one communicator they would
    meet the wrong calls, and a rank that waits for the reduction would keep the others from getting
    there. So the backward of each block begins with the reductions of the blocks behind it, complete
    or not; parameters without a gradient contribute zeros.

        all used      gather 1 │ backward 2, reduce 2 │           gather 0 │ backward 1 ...
        some unused   gather 1 │ backward 2           │ reduce 2, gather 0 │ backward 1 ...

    FSDP2 starts them there too (its post-backward hook). Where the backward is split, weight
    gradients come later, in one part: then incomplete groups wait for the end of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.parallel.autograd.not_compiled import not_compiled
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.zero.gradient_reducer import GradientReducer


def register_backward_order(
    reducer: GradientReducer, stage: int, chain: Sequence[nn.Module]
) -> list[RemovableHandle]:
    """Have the backwards of a stage's blocks, which run in the order of `chain`, start the
    reductions of the blocks behind them. To be called before `register_unshard_hooks`.
    """
    if reducer.is_reduced_once or stage in reducer.split_stages:
        return []
    positions: dict[int, int] = {}
    for position, block in enumerate(chain):
        for param in block.parameters():
            positions.setdefault(id(param), position)
    reducer.order_by_blocks(stage, positions)
    return [
        block.register_forward_hook(_after_forward(reducer, stage, position))
        for position, block in enumerate(chain)
    ]


def _after_forward(
    reducer: GradientReducer, stage: int, position: int
) -> Callable[[nn.Module, Any, Any], None]:
    weak_reducer = weakref.ref(reducer)  # see Note [Hooks hold no reducer]

    def before_backward(gradient: Tensor) -> None:
        found = weak_reducer()
        if found is not None:
            found.reduce_behind(stage, position)

    @not_compiled
    def after_forward(module: nn.Module, args: Any, out: Any) -> None:
        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)

    return after_forward
