"""Blocks on whole sequences under context parallelism: their input is gathered, each rank keeps its columns of the output.

Note [Whole sequences under cp]
    A block that mixes tokens by code of its own (a recurrence, a convolution, a bias of its own
    attention), or that counts positions itself, is not accepted on the columns of a rank. If its
    class says that it may (`may_gather_sequence`), every rank computes it on whole sequences:

        x: own columns  -- all-gather -->  whole sequences  -- the block -->  whole  -- slice -->  own columns
        dx: own columns <-- slice x c --   whole, 1/c       <-- backward --   1/c    <-- all-gather --  dy

    All c ranks compute the same numbers as one device. The gradients of parameters are summed over
    cp, as those of every other block; so the gradient of the output is divided by c on its way in,
    and that of the input multiplied on its way out. Had each rank the gradient of its own columns
    alone, the parts could cancel each other, and a model that computes in float32 would round them.

    Memory and time of such a block are those of a mesh without cp; between blocks a rank holds its
    columns alone. Of a block that names its parts (`gatherable_parts`) the one that mixes tokens is
    gathered alone, where that is enough: the rest, such as experts, works on columns. What the code
    around a layer hands it beside its input (rotary tables, masks, biases) is then that of whole
    sequences, see `whole_trunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.models.common.attention import Attend, FusedAttention
from weft.models.common.batch import Batch
from weft.parallel.context.documents import in_rank_order, in_sequence_order, whole_documents_of

SEQ_DIM = 1
HIDDEN = "hidden_states"
"""Keyword of the input of a part, where it is called by keywords."""
WHOLE_TRUNK = "whole_trunk"
"""Attribute of a block with parts: whether its batch is of whole sequences, and its input is not."""


@dataclass(frozen=True)
class WholeUse:
    """How a block works on whole sequences.

    Attributes:
        reason: what it does that is not accepted on the columns of a rank.
        part: path of the module that alone does; empty: the whole block.
    """

    reason: str
    part: str = ""


def gatherable_parts(block: nn.Module) -> Sequence[str]:
    """Paths of modules in a block that may be gathered alone."""
    found: Sequence[str] = getattr(block, "gatherable_parts", ())
    return found


def with_inputs(
    args: tuple[Any, ...], options: dict[str, Any], act: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a part, with `act` applied to its input, and to all of the same shape (what is
    added to its output).
    """
    x: Tensor = args[0] if args else options[HIDDEN]

    def changed(value: Any) -> Any:
        is_input = isinstance(value, Tensor) and value.shape == x.shape
        return act(value) if is_input else value

    return tuple(map(changed, args)), {name: changed(value) for name, value in options.items()}


class WholeSequences:
    """The whole sequences of which the ranks of an axis hold columns. The last batch is gathered once
    for all blocks that read it.
    """

    def __init__(self, comm: Comm, axis: Axis) -> None:
        self.comm = comm
        self.axis = axis
        self.degree = comm.degree(axis)
        self._last: tuple[Batch, Batch] | None = None

    def gathered(self, x: Tensor) -> Tensor:
        """Own columns -> those of all ranks, in the order of the sequence."""
        by_rank = ops.gather_from_region(x, self.comm, self.axis, SEQ_DIM)
        return in_sequence_order(by_rank, self.degree)

    def columns(self, x: Tensor) -> Tensor:
        """This rank's columns of whole sequences that all ranks hold."""
        by_rank = in_rank_order(x, self.degree)
        return ops.scatter_to_region(by_rank, self.comm, self.axis, SEQ_DIM)

    def enter(self, x: Tensor) -> Tensor:
        """The input of what works on whole sequences."""
        whole = self.gathered(x)
        return join_gradient(whole, self.comm, self.axis) if x.is_floating_point() else whole

    def leave(self, x: Tensor) -> Tensor:
        """This rank's columns of its output."""
        return self.columns(share_gradient(x, self.comm, self.axis))

    def batch(self, own: Batch) -> Batch:
        """The batch of whole sequences."""
        # The pair holds the batch, so no later one can have its identity.
        if self._last is None or self._last[0] is not own:
            without_documents = replace(own, documents=None, whole_documents=None)
            whole = without_documents.map(lambda x: x if x.dim() == 1 else self.gathered(x))
            self._last = own, replace(whole, documents=whole_documents_of(own))
        return self._last[1]


def work_on_whole_sequences(block: nn.Module, sequences: WholeSequences, *, part: str = "") -> None:
    """Compute a block, or a part of it, as Note [Whole sequences under cp] says."""
    for module in block.modules():
        if isinstance(module, Attend):
            module.implementation = FusedAttention()
    if part:
        setattr(block, WHOLE_TRUNK, True)
        hooks = _PartHooks(sequences)
        block.register_forward_pre_hook(hooks.before_block, prepend=True)
        inner = block.get_submodule(part)
        inner.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True)
        inner.register_forward_hook(hooks.behind)
        return

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, batch = args
        if batch.is_never_sharded:
            return args
        return sequences.enter(x), sequences.batch(batch)

    def split(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out if args[1].is_never_sharded else sequences.leave(out)

    block.register_forward_pre_hook(gather, prepend=True)
    block.register_forward_hook(split)


class _PartHooks:
    """Hooks of a block, and of the part of it that works on whole sequences."""

    def __init__(self, sequences: WholeSequences) -> None:
        self.sequences = sequences
        self.is_sharded = True

    def before_block(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The batch of whole sequences beside this rank's columns of the input."""
        x, batch = args
        self.is_sharded = not batch.is_never_sharded
        return (x, self.sequences.batch(batch)) if self.is_sharded else args

    def before(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The part's input is gathered."""
        if not self.is_sharded:
            return args, options
        return with_inputs(args, options, self.sequences.enter)

    def behind(self, _: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        """This rank's columns of its output."""
        return with_columns(out, self.sequences.leave) if self.is_sharded else out


def with_columns(out: Any, columns: Callable[[Tensor], Tensor]) -> Any:
    """What a part returns, with some columns of its output: the first where it returns several."""
    return columns(out) if isinstance(out, Tensor) else (columns(out[0]), *out[1:])


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return ops.same_values(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def share_gradient(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """x, whose gradient is replicated; behind it each rank holds an equal share, and the sum is the
    gradient.
    """
    shared: Tensor = _ScaledGradient.apply(x, 1 / comm.degree(axis))  # type: ignore[no-untyped-call]
    return shared


def join_gradient(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """x, of whose gradient each rank holds an equal share; behind it the gradient is replicated."""
    joined: Tensor = _ScaledGradient.apply(x, comm.degree(axis))  # type: ignore[no-untyped-call]
    return joined
