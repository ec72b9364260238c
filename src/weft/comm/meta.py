"""Transport without other ranks: dry runs of one rank of a world of any size, on meta or real tensors."""

from __future__ import annotations

import torch

from weft.comm.transport import Call, OnLate, SharedResults


class MetaTransport:
    """Rank `rank` of a world of `size`; the other ranks do not exist.

    Results have the right shapes and dtypes. In-place reductions and broadcasts leave their tensor
    as it is, all other outputs on real devices are zeros: meaningless, but finite and reproducible.
    """

    def __init__(self, size: int, rank: int, *, device: str | torch.device = "meta") -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)

    def start(self, call: Call, on_late: OnLate) -> None:
        """Complete `call` at once."""
        output = call.output
        is_in_place = call.op in ("all_reduce", "broadcast")
        if output is None or output.is_meta or is_in_place:
            return
        output.zero_()


class SharedMetaTransport(MetaTransport):
    """A `MetaTransport` of a rank that is played after others of its world in one process.

    Args:
        shared_results: of all these ranks.
    """

    def __init__(self, size: int, rank: int, *, shared_results: SharedResults) -> None:
        super().__init__(size, rank)
        self.shared_results = shared_results
