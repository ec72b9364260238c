"""Owns the transport where nobody is there: for dry runs of a world of any size, on meta tensors or on real ones."""

from __future__ import annotations

import torch

from weft.comm.transport import Call


class MetaTransport:
    """Rank `rank` of a world of `size`, alone.

    Results have the right shapes and dtypes. In-place operations leave their tensor as it is, everything else comes out
    as zeros: of no use, but finite and the same every time.
    """

    def __init__(self, size: int, rank: int, *, device: str | torch.device = "meta") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)

    def start(self, call: Call) -> Arrived:
        """Answer for everybody."""
        if call.take is not None and call.op not in ("all_reduce", "broadcast"):
            call.take.zero_()
        return Arrived()


class Arrived:
    """A call that was over before it began."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Always."""
        return True
