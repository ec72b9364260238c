"""Operands of products in fp8 that serve several products: rows of weights, and rows of inputs that several linears read.

Note [Operands that are kept]
    A pass is what one step does with all its micro-batches, or an evaluation with its. Weights do not
    change meanwhile, so their rows in fp8 are those of every micro-batch:

        rows of the input       until another input is read: by q, k and v; by gate and up
        rows of the weight      for outputs, and apart from them for input gradients: from the first
                                micro-batch that needs them to the end of the pass

    A weight whose memory is freed between its uses (ZeRO 3, 4 bits) is rounded for each of them, and so
    is every one in a pass of one micro-batch, which uses each of the two once. Outside of a pass nothing
    is kept: the next reader may find other values there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor, UntypedStorage

Use = Literal["output", "input gradient"]


class RoundedRows(NamedTuple):
    """Rows of numbers of e4m3, each of which was multiplied by a scale.

    Attributes:
        values: [..., K], in e4m3 where the device has products of them, else in a wider type.
        inverse: [..., 1], 1 / scale.
    """

    values: Tensor
    inverse: Tensor


@dataclass(eq=False)
class LastInput:
    """The rows of the input that a linear of this rank has read last."""

    _storage: Callable[[], UntypedStorage | None] = lambda: None
    _view: tuple[Hashable, ...] = ()
    _rows: RoundedRows | None = None

    def rows(self, x: Tensor, how: Hashable, make: Callable[[], RoundedRows]) -> RoundedRows:
        """The rows of x that `make` returns, or has returned for the linear before.

        Args:
            how: what they depend on besides x.
        """
        storage = x.untyped_storage()
        # the version, too: an operation in place leaves the same memory with other values
        view = (x.storage_offset(), x.shape, x.stride(), x._version, how)
        if self._rows is None or self._storage() is not storage or self._view != view:
            # freed before the new ones are made: two sets would be in memory at once
            self._rows = None
            self._rows = make()
            # not kept alive: another tensor may get the same memory, with a storage of its own
            self._storage = weakref.ref(storage)
            self._view = view
        return self._rows

    def clear(self) -> None:
        """Free the rows."""
        self._rows = None


@dataclass(eq=False)
class KeptOperands:
    """What a product in fp8 keeps of its operands; see Note [Operands that are kept].

    Attributes:
        keeps_weight: whether rows of the weight are kept now.
        last_input: of all linears of the rank; None outside of a pass.
    """

    keeps_weight: bool = False
    last_input: LastInput | None = None
    _weight: dict[Use, RoundedRows] = field(default_factory=dict)

    def begin(self, last_input: LastInput, *, keeps_weight: bool) -> None:
        """A pass begins."""
        self.last_input = last_input
        self.keeps_weight = keeps_weight

    def end(self) -> None:
        """It has ended: the values of weights may change."""
        self.last_input = None
        self.keeps_weight = False
        self._weight.clear()

    def input(self, x: Tensor, how: Hashable, make: Callable[[], RoundedRows]) -> RoundedRows:
        """See `LastInput.rows`."""
        return make() if self.last_input is None else self.last_input.rows(x, how, make)

    def weight(self, use: Use, make: Callable[[], RoundedRows]) -> RoundedRows:
        """The rows of the weight that `make` returns, or has returned for this use before."""
        if use == "input gradient" and self.last_input is not None:
            self.last_input.clear()  # no linear of this forward is left that would read it
        if not self.keeps_weight:
            return make()
        if use not in self._weight:
            self._weight[use] = make()
        return self._weight[use]
