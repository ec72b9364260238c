"""Owns computing the angles of new tokens once for all layers: for one token they cost as much as a matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from weft.models.common.rope import Rope

Turn = tuple[Tensor, Tensor]


@dataclass
class Last:
    """The positions that were asked for last, and their cosines and sines."""

    positions: Tensor | None = None
    turn: Turn | None = None


class SharedRope(nn.Module):
    """As `Rope`, for layers that ask for the very same positions one after the other."""

    def __init__(self, inner: Rope, last: Last) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def forward(self, positions_BS: Tensor) -> Turn:
        """As `Rope`."""
        if self.last.turn is None or self.last.positions is not positions_BS:
            self.last.positions, self.last.turn = positions_BS, self.inner(positions_BS)
        return self.last.turn


def share_angles(stages: Mapping[int, nn.ModuleDict]) -> None:
    """Let all layers that turn alike ask once."""
    lasts: dict[object, Last] = {}
    for stage in stages.values():
        for path, module in list(stage.named_modules()):
            if isinstance(module, Rope):
                alike = (module.head_size, module.theta, module.scaling)
                stage.set_submodule(path, SharedRope(module, lasts.setdefault(alike, Last())))
