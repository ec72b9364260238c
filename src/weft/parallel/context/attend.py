"""Owns context parallelism: each rank holds part of every sequence, and the `Attend` seam reaches the other parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.sequence import Context
from weft.models.common.batch import Batch
from weft.models.common.layers import Attend
from weft.parallel.context import documents
from weft.parallel.context.gathered import Gathered
from weft.parallel.context.pieces import Attention, Route
from weft.parallel.context.ring import Ring
from weft.parallel.context.ulysses import UlyssesAttend

AXIS = "cp"


class PiecesAttend(nn.Module):
    """The seam where queries stay at home and keys and values come by a route."""

    def __init__(self, route: Route, comm: Comm, *, scale: float | None) -> None:
        super().__init__()
        self.route, self.comm, self.scale = route, comm, scale

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch) -> Tensor:
        """This rank's columns of q, k and v -> its out_BSHW."""
        scale = q_BSHK.shape[-1] ** -0.5 if self.scale is None else self.scale
        attention = Attention(self.route, scale=scale, causal=True, documents=self._documents(batch))
        return attention(q_BSHK, k_BSGK, v_BSGW)

    def _documents(self, batch: Batch) -> tuple[Tensor, ...] | None:
        if batch.documents is None:
            return None
        if batch.whole_documents is None:
            return documents.of_each_rank(batch.documents, self.comm, AXIS)
        return documents.cut(batch.whole_documents, self.comm.degree(AXIS))


VARIANTS: Mapping[Context, Callable[[Attend, Comm], nn.Module]] = {
    "ring": lambda inner, comm: PiecesAttend(Ring(comm, AXIS), comm, scale=inner.scale),
    "allgather": lambda inner, comm: PiecesAttend(Gathered(comm, AXIS), comm, scale=inner.scale),
    "ulysses": UlyssesAttend,
}


def apply(block: nn.Module, *, comm: Comm, variant: Context) -> None:
    """Swap the attention below `block`: its queries shall meet the keys of every rank along cp."""
    for path, module in list(block.named_modules()):
        if isinstance(module, Attend):
            block.set_submodule(path, VARIANTS[variant](module, comm))
