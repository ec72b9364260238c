"""Blocks whose training forward and backward torch.compile compiles; see Note [What is compiled] in layout/compilation.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.errors import Fault, PlanError, type_and_message
from weft.layout.compilation import KEY, NOT_COMPILED, OFF, Compile
from weft.models.common import attention, experts
from weft.models.common.batch import Batch
from weft.models.common.buffer_updates import updates_buffers
from weft.models.common.compiler import compile_function
from weft.models.common.head_output import is_watched

Forward = Callable[[Any, Batch], Any]


def compiled_block(
    name: str, block: nn.Module, *, drops_out: bool, mode: Compile = "blocks"
) -> nn.Module:
    """The block, compiled; itself if it is one of those that are not.

    Args:
        drops_out: whether its forward has dropout: compiled code would draw masks of its own.
        mode: "auto": a block with dropout runs as it is written.

    Raises:
        PlanError: it has dropout, and blocks are to be compiled in any case.
    """
    if name in NOT_COMPILED or updates_buffers({name: block}):
        return block
    if drops_out and mode == "auto":
        return block
    if drops_out:
        what = f"{name} drops out, which compiled blocks do not do by counter"
        raise PlanError(Fault(KEY, what, got="blocks", need="off", fix=f"{OFF}, or dropout 0"))
    return CompiledBlock(name, block)


class CompiledBlock(nn.Module):
    """A block whose forward is compiled where it is differentiated.

    Evaluation, generation, and forwards without values (on the meta device) run it as it is written.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.block = block
        self._compiled: Forward | None = None

    def forward(self, x: Any, batch: Batch) -> Any:
        """The block's own forward."""
        if not torch.is_grad_enabled() or not _has_values(self.block):
            return self.block(x, batch)
        if self._compiled is not None:
            return self._named_errors(self._compiled, x, batch)
        first = next(self.block.parameters())
        attention.fix_for_compiler(self.block, first)
        _leave_out()
        compiled = compile_function(_call_of(self.block), first.device)
        out = self._named_errors(compiled, x, batch)
        self._compiled = compiled
        return out

    def _named_errors(self, compiled: Forward, x: Any, batch: Batch) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # it is imported with the compiler

        try:
            return compiled(x, batch)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", None) or error
            what = f"{self.name} cannot be compiled: {type_and_message(cause)}"
            raise PlanError(Fault(KEY, what, got="blocks", need="off", fix=OFF)) from error


def _has_values(block: nn.Module) -> bool:
    """Whether the block has parameters, which are on no meta device, and runs for itself: not below a
    mode that looks at its operations.
    """
    first = next(block.parameters(), None)
    return first is not None and not is_watched(first)


def _call_of(block: nn.Module) -> Forward:
    """The call of a block with the hooks that it has; one code for all blocks, so that equal blocks have
    one graph.
    """

    def call(x: Any, batch: Batch) -> Any:
        return block(x, batch)

    return call


@functools.cache
def _leave_out() -> None:
    """Have compiled code call these as they are: what they do depends on the values of a batch, so there
    would be a graph for each. A mark alone does not make torch's compiler leave a function out.
    """
    attention._in_parts = torch.compiler.disable(attention._in_parts)
    dispatch: Any = experts.Dispatch
    dispatch.forward = torch.compiler.disable(dispatch.forward)
