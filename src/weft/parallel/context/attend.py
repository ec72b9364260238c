"""Attention across context-parallel ranks: each holds part of every sequence; implementations of the `Attend` seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.attention_mask import Feature
from weft.core.sequence import Context
from weft.models.common.attention import AttentionImplementation, AttentionSpec, set_implementations
from weft.models.common.batch import Batch
from weft.parallel.context import documents
from weft.parallel.context.gathered import Gathered
from weft.parallel.context.pieces import Attention, Route
from weft.parallel.context.ring import Ring
from weft.parallel.context.ulysses import UlyssesAttention

AXIS = "cp"


class BlockwiseAttention:
    """Queries stay on their rank; keys and values of the other ranks come in blocks."""

    supports: frozenset[Feature] = frozenset(("causal", "documents"))
    alternative = "--parallel.context ulysses"

    def __init__(self, route: Route, comm: Comm, *, name: str) -> None:
        self.route, self.comm, self.name = route, comm, name

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
        """This rank's columns of q, k and v -> its out_BSHW."""
        attention = Attention(
            self.route, scale=spec.scale_of(q_BSHK), causal=spec.mask.causal, documents=self._documents(batch, spec)
        )
        return attention(q_BSHK, k_BSGK, v_BSGW)

    def _documents(self, batch: Batch, spec: AttentionSpec) -> tuple[Tensor, ...] | None:
        if batch.documents is None or not spec.mask.documents:
            return None
        if batch.whole_documents is None:
            return documents.of_each_rank(batch.documents, self.comm, AXIS)
        return documents.cut(batch.whole_documents, self.comm.degree(AXIS))


VARIANTS: Mapping[Context, Callable[[Comm], AttentionImplementation]] = {
    "ring": lambda comm: BlockwiseAttention(Ring(comm, AXIS), comm, name="ring"),
    "allgather": lambda comm: BlockwiseAttention(Gathered(comm, AXIS), comm, name="all-gather"),
    "ulysses": UlyssesAttention,
}


def apply(name: str, block: nn.Module, *, comm: Comm, variant: Context) -> None:
    """Let the attention below the block of this name reach the keys of every rank along cp.

    Raises:
        PlanError: an `Attend` that requires what the variant does not support, or does not declare what it requires.
    """
    implementation = VARIANTS[variant](comm)
    set_implementations(block, lambda: implementation, name=name)
