"""Comparison of a block's output for whole sequences with that for the columns of each context-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.models.common.batch import Batch
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.parallel.context.documents import DOCUMENTS_OF_BATCH, OWN_DOCUMENTS
from weft.parallel.context.probe_block import Activation, ProbeBlock

TOLERANCE = 1e-3
"""Relative to the largest output: rounding in float32 is 1e-6, a block that mixes tokens is off by
1e-1.
"""

TOLERANCE_16_BIT = 5e-2
"""The same for parameters in bfloat16 or float16."""

MIXES = "mixes tokens outside of Attend, or counts positions itself: under cp it would see its rank's columns alone"
NEED = "attention by weft.models.common.attention.Attend and positions from batch.positions"
WITHOUT_CP = "a mesh without cp"


@dataclass(frozen=True)
class ProbeSizes:
    """Of the batch that a block is checked with, and of the run.

    Attributes:
        rows, length: of the batch.
        degree: ranks that share a sequence.
        run_length: of the run's sequences.
        vocab: number of token ids.
        is_computed: whether the block is run with values.
    """

    rows: int
    length: int
    degree: int
    run_length: int
    vocab: int
    is_computed: bool = True


class MixesTokensError(Exception):
    """What is wrong with a block, without its name."""

    def __init__(self, what: str, *, got: str = "", need: str = "", fix: str = WITHOUT_CP) -> None:
        super().__init__(what)
        self.what, self.got, self.need, self.fix = what, got, need, fix


def columns_of(x: Activation, batch: Batch, index: int, degree: int) -> tuple[Activation, Batch]:
    """What one rank holds of a batch."""
    own_batch = batch.columns(index=index, degree=degree)
    columns = own_batch.positions[0]
    own_x: Activation = map_leaves(x, Tensor, lambda one: one[:, columns.to(one.device)])
    return own_x, own_batch


def check_positions(out: Activation, sizes: ProbeSizes) -> None:
    """The output for whole sequences has a position for each token.

    Raises:
        MixesTokensError: it has not.
    """
    for tensor in tensors_in(out):
        if tuple(tensor.shape[:2]) != (sizes.rows, sizes.length):
            raise MixesTokensError(
                "hands on an activation without a position for each token: under cp it would see its rank's columns alone",
                got=f"shape {tuple(tensor.shape)}",
            )


def compare_columns(probe: ProbeBlock, x: Activation, batch: Batch, sizes: ProbeSizes) -> None:
    """Compare the output for whole sequences with that for the columns of each rank.

    Raises:
        MixesTokensError: they differ; or `Attend` is given documents of a rank's columns.
    """
    wholes = list(tensors_in(probe.run(x, batch)))
    of_whole = list(probe.attended)
    tolerance = tolerance_of(probe)
    for index in range(sizes.degree):
        own_x, own_batch = columns_of(x, batch, index, sizes.degree)
        own = probe.run(own_x, own_batch)
        columns = own_batch.positions[0]
        _check_documents(of_whole, probe.attended, columns)
        for tensor, own_tensor in zip(wholes, tensors_in(own), strict=True):
            check_close(own_tensor, tensor[:, columns], whole=tensor, tolerance=tolerance)


def tolerance_of(probe: ProbeBlock) -> float:
    """The largest difference of a block's output, for the type of its parameters."""
    return TOLERANCE_16_BIT if probe.dtype in (torch.bfloat16, torch.float16) else TOLERANCE


def check_close(own: Tensor, expected: Tensor, *, whole: Tensor, tolerance: float) -> None:
    """A rank's columns are those of the whole output.

    Raises:
        MixesTokensError: they differ.
    """
    if own.shape != expected.shape or _difference(own, expected, whole) > tolerance:
        raise MixesTokensError(MIXES, need=NEED)


def _difference(own: Tensor, expected: Tensor, whole: Tensor) -> float:
    """The largest, relative to the largest output; 0 of empty tensors. NaN equals itself."""
    if not expected.numel():
        return 0.0
    error = (own.double().nan_to_num() - expected.double().nan_to_num()).abs().max()
    largest = whole.double().nan_to_num().abs().max()
    return float(error / largest.clamp(min=1e-30))


def _check_documents(of_whole: list[Batch], of_rank: list[Batch], columns: Tensor) -> None:
    """`Attend` on a rank is given the documents of the whole sequences, and its columns of them."""
    for whole, own in zip(of_whole, of_rank, strict=True):
        expected = whole.documents
        own_columns = None if expected is None else expected[:, columns]
        if not (
            _is_same(own.documents, own_columns)
            and (expected is None or _is_same(own.whole_documents, expected))
        ):
            raise MixesTokensError(
                f"its documents {OWN_DOCUMENTS}", need="batch.documents", fix=DOCUMENTS_OF_BATCH
            )


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
