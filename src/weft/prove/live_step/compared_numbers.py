"""Rows of what is compared of a live step: outputs, gradients and numbers of the step, and a difference among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.prove.live_step.owner_gradients import GradientNoise
from weft.prove.report import Phase


@dataclass(frozen=True)
class OutputRow:
    """The output of a block for one sequence: projections on the layout and on one device.

    Attributes:
        layout: mean over the copies that ranks hold; None where no rank has reported it.
        size: Euclidean norm of the output on one device.
    """

    block: str
    sequence: int
    layout: float | None
    plain: float
    size: float


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter.

    Attributes:
        difference: largest absolute difference of an entry, over all ranks.
        largest: largest absolute entry on one device.
        noise: what noise changes in the gradient of one micro-batch.
        products: over the entries that ranks hold, copies too: the layout's times those of one
            device, and the squares of these.
        squared_norm: on one device.
        is_product: whether it is a product of matrices; see `MetaChain.products`.
        is_router: whether it is of a router, which in 16 bits is not compared: rounding exchanges
            tokens between experts, which leaves the loads as they are.
    """

    parameter: str
    num_entries: int
    difference: float
    largest: float
    noise: GradientNoise
    products: tuple[float, float]
    squared_norm: float
    is_product: bool = True
    is_router: bool = False

    @property
    def projection(self) -> float:
        """The layout's gradient along that of one device, which is 1 there."""
        of_layout, of_plain = self.products
        return of_layout / of_plain if of_plain else 1.0


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a whole step."""

    loss: float
    norm: float
    targets: int
    loads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveDifference:
    """A number or tensor of a step that is not that of one device."""

    tensor: str
    block: str
    parameter: str
    phase: Phase
    relation: str
    measured: float
    bound: float
