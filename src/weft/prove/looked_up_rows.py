"""How far rounding of gradients moves the rows that the first block of a model looks up in its tables.

Note [Bounds of looked-up rows]
    Rounding may flip the update of an entry whose gradient is small, and moves it by a few learning
    rates (see Note [Bounds]). Few entries of a table are flipped in a perturbed run, and mostly others
    than on a layout. Outputs of products are sums over many entries, of which perturbed runs flip
    some, too. But an output of the first block is one entry of a table, or the sum of few of them:
    where its tokens' rows are flipped on a layout alone, no perturbed run says so. So such an output
    may differ by what its own entries may. The block is affine in its tables W, with factors that
    are not negative: if W may move by F, its output may move by f(W + F) - f(W). A block for which
    f(W + F) - f(W) is not f(W) - f(W - F), or that reads no tokens, has no such bound.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.models.common.batch import Batch, activation_of
from weft.models.common.dropout_mode import run_block

IS_AFFINE = 1e-9
"""Largest difference, beside the output, of both sides in float64."""
Values = Mapping[str, Tensor]


def free_rows(
    name: str, block: nn.Module, *, values: Values, free: Values, batch: Batch
) -> Tensor | None:
    """For each entry of the output of the first block, how far it may move; None: that is not known.

    Args:
        values: of the parameters of the block, by their names in it.
        free: how far each entry of these may move; without those that may not.
    """
    if batch.inputs.is_floating_point() or not free:
        return None
    # A copy, since the values of another step are put into it.
    module = copy.deepcopy(block).double()

    @torch.no_grad()
    def output(sign: int) -> Tensor:
        for path, param in module.named_parameters():
            moved = sign * free[path] if path in free else 0.0
            param.data = values[path].double() + moved
        out: Tensor = activation_of(run_block(name, module, batch.inputs, batch))
        return out

    below, plain, above = (output(sign) for sign in (-1, 0, 1))
    rows = above - plain
    rounding = IS_AFFINE * float(above.abs().max())
    is_affine = torch.allclose(rows, plain - below, rtol=0.0, atol=rounding)
    return rows if is_affine and bool((rows >= -rounding).all()) else None
