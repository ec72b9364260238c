"""`Optimizer`: the contract of an update rule, which is applied to the shards of parameters under every layout."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from weft.parallel.zero.param_entries import state_shape

State = dict[str, Tensor]
"""Tensors that a rule keeps for one parameter, by key."""

Kind = Literal["elementwise", "whole_matrix", "reductions"]
StateAxes = Literal["entries", "rows", "columns", "scalar"]
"""Axes of a state tensor, for a parameter of shape [..., A, B]:

    entries   [..., A, B]   one number for each entry, sharded as the parameter is
    rows      [..., A, 1]   whole on every rank that holds entries
    columns   [..., 1, B]   the same
    scalar    []            one number for the parameter
"""

Sums = Generator[Sequence[Tensor], Sequence[Tensor], None]
"""Yields partial sums of this rank's entries, and receives the sums over all entries."""


class Entries(Protocol):
    """The entries of one parameter that this rank holds, for sums over rows, columns or all of it.

    Attributes:
        shape: of the whole parameter.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, x: Tensor) -> Tensor:
        """Partial sum of x along the last dim, [..., A, 1]; x has a number for each local entry."""
        ...

    def columns(self, x: Tensor) -> Tensor:
        """Partial sum of x along the last dim but one, [..., 1, B]."""
        ...

    def spread(self, x: Tensor) -> Tensor:
        """The numbers of x ([..., A, 1], [..., 1, B]) at each local entry."""
        ...


class Optimizer:
    """An update rule. A subclass is an optimizer of weft: `--optim.name package.module:Class`.

    An instance holds settings (`optim.options`, as arguments of its constructor), and no tensors:
    weft allocates the state that `state_axes` declares, zero at the start, and stores it in
    checkpoints under the parameter's name. What a rank passes in is its shard: one-dimensional
    under ZeRO, a slice under tensor parallelism. There are three kinds:

        elementwise     `update` changes each entry by that entry's gradient and state alone
        whole_matrix    `direction` and `apply` are elementwise; between them `transform` gets the
                        logical matrix, gathered on one rank: [A, B], one expert at a time
        reductions      `update_with_sums` is elementwise but for sums over rows, columns or the
                        whole parameter, which it yields

    The declaration is checked on random numbers before a run starts: `check_contract`.

    Attributes:
        kind: one of these.
        states: state key -> its axes, see `StateAxes`.
        nonnegative: keys of states that are never negative; in 8 bits they have twice the precision.
    """

    kind: ClassVar[Kind] = "elementwise"
    states: ClassVar[Mapping[str, StateAxes]] = {}
    nonnegative: ClassVar[frozenset[str]] = frozenset()

    def state_axes(self, ndim: int) -> Mapping[str, StateAxes]:
        """The state of a parameter with `ndim` dims; default: `states`."""
        return self.states

    def fresh_state(self, param: Tensor, shape: tuple[int, ...]) -> State:
        """State before the first step, zero.

        Args:
            param: this rank's entries.
            shape: of the whole parameter.
        """
        state = {}
        for key, axes in self.state_axes(len(shape)).items():
            if axes == "entries":
                state[key] = torch.zeros_like(param, requires_grad=False)
            elif axes == "scalar":
                state[key] = torch.zeros((), dtype=torch.float32, device=param.device)
            else:
                state[key] = param.new_zeros(state_shape(shape, axes), requires_grad=False)
        return state

    # elementwise

    def update(
        self, param: Tensor, grad: Tensor, state: State, *, lr: float, weight_decay: float
    ) -> None:
        """Change `param` and the tensors of `state` in place."""
        raise NotImplementedError

    def update_all(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """`update` of several parameters; a rule with a kernel for lists of tensors overrides it."""
        for param, grad, state in zip(params, grads, states, strict=True):
            self.update(param, grad, state, lr=lr, weight_decay=weight_decay)

    @property
    def skips_on_device(self) -> bool:
        """Whether there is an `update_all_unless`."""
        return False

    def update_all_unless(
        self,
        skip: Tensor,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """`update_all`, which changes nothing if the float32 scalar `skip` is 1; the host does not
        wait for it.
        """
        raise NotImplementedError

    # whole_matrix

    def direction(self, grad: Tensor, state: State) -> Tensor:
        """What is gathered for `transform`, of the gradient's shape; changes `state` in place."""
        raise NotImplementedError

    def gather_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which directions are sent to the rank that transforms them, for parameters of
        `dtype`.
        """
        return dtype

    def transform(self, matrix: Tensor) -> Tensor:
        """A new matrix of the same shape [A, B], from the direction of one logical matrix."""
        raise NotImplementedError

    def apply(
        self,
        param: Tensor,
        direction: Tensor,
        *,
        lr: float,
        weight_decay: float,
        shape: tuple[int, int],
    ) -> None:
        """Change `param` in place by its entries of the transformed matrix, which has `shape`."""
        raise NotImplementedError

    # reductions

    def update_with_sums(
        self,
        param: Tensor,
        grad: Tensor,
        state: State,
        *,
        entries: Entries,
        lr: float,
        weight_decay: float,
    ) -> Sums:
        """As `update`; yields tuples of partial sums, and is sent the sums over all entries.

        Every parameter yields equally often; one all-reduce serves all parameters.
        """
        raise NotImplementedError
