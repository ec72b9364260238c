"""The shard of a vocabulary that one rank holds, for heads that compute losses chunk by chunk."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import span
from weft.core.mesh import Axis
from weft.models.common.head_output import WholeVocabulary


class VocabularyShard(WholeVocabulary):
    """The entries of the vocabulary that this rank holds, for a head that computes losses chunk by
    chunk: two all-reduces of one number a token in each chunk.

    Args:
        vocab: entries of all ranks along `axis`.
    """

    def __init__(self, comm: Comm, axis: Axis, vocab: int) -> None:
        self.comm = comm
        self.axis = axis
        self.vocab = vocab
        self.degree = comm.degree(axis)
        self.lo, _ = span(vocab, self.degree, comm.index(axis))

    def most_entries(self, weight_VD: Tensor) -> int:
        """Those of the first rank."""
        return -(-self.vocab // self.degree)

    def num_entries(self, weight_VD: Tensor) -> int:
        """Entries of the whole vocabulary."""
        return self.vocab

    def operands(self, proj: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """The whole x, where the region is entered, and this rank's rows of the weight."""
        found: tuple[Tensor, Tensor] = cast(Any, proj).operands(x)
        return found

    def largest(self, x: Tensor) -> Tensor:
        """The largest of each entry over all ranks."""
        return self.comm.all_reduce(x, self.axis, op="max")

    def total(self, x: Tensor) -> Tensor:
        """The sum of each entry over all ranks."""
        return self.comm.all_reduce(x, self.axis)
