"""Blocks whose training forward and backward torch.compile compiles; see Note [What is compiled] in layout/compilation.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.errors import Fault, PlanError, type_and_message
from weft.layout.compilation import KEY, NOT_COMPILED, OFF, Compile
from weft.layout.recomputation import RecomputeMode
from weft.models.common import attention
from weft.models.common.batch import Batch
from weft.models.common.buffer_updates import updates_buffers
from weft.models.common.compiler import compile_function, leave_out
from weft.models.common.head_output import is_watched
from weft.models.common.rope import Rope, given_angles
from weft.parallel.recompute.selective import SelectiveRecompute

Forward = Callable[..., Any]


def compiled_block(
    name: str,
    block: nn.Module,
    *,
    drops_out: bool,
    mode: Compile = "blocks",
    recompute: RecomputeMode = "none",
) -> nn.Module:
    """The block, compiled; itself if it is one of those that are not.

    Args:
        drops_out: whether its forward has dropout: compiled code would draw masks of its own.
        mode: "auto": a block with dropout runs as it is written.
        recompute: "selective": the backward of compiled code recomputes what is cheap.

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
    return CompiledBlock(name, block, recomputes=recompute == "selective")


class CompiledBlock(nn.Module):
    """A block whose forward is compiled where it is differentiated; its hooks run as they are written.

    Evaluation, generation, and forwards without values (on the meta device) run it as it is written.

    Attributes:
        drops_out: never. The first forward of a block of which it is not known is looked at by a mode,
            and would run as it is written: the first step would compare other code than later ones run.
        recomputes: whether it is recomputed selectively.
    """

    drops_out = False

    def __init__(self, name: str, block: nn.Module, *, recomputes: bool = False) -> None:
        super().__init__()
        self.name = name
        self.block = block
        self.recomputes = recomputes
        self._compiled: Forward | None = None
        self._ropes = tuple(module for module in block.modules() if isinstance(module, Rope))

    def forward(self, x: Any, batch: Batch) -> Any:
        """The block's own forward."""
        if not torch.is_grad_enabled():
            return self.block(x, batch)
        if not _has_values(self.block):
            with SelectiveRecompute() if self.recomputes else nullcontext():
                return self.block(x, batch)
        compiled = self._compiled or self._compile()
        attributes = vars(self.block)
        own = attributes.get("forward")
        # For this call alone: the block's hooks run around it, not compiled, as they were registered.
        attributes["forward"] = partial(self._call, compiled)
        try:
            out = self.block(x, batch)
        finally:
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own
        self._compiled = compiled
        return out

    def _compile(self) -> Forward:
        first = next(self.block.parameters())
        attention.fix_for_compiler(self.block, first)
        leave_out(self.block)
        call = _call_of(self.block.forward)
        return compile_function(call, first.device, recomputes=self.recomputes)

    def _call(self, compiled: Forward, x: Any, batch: Batch) -> Any:
        """Compiled code, once the block's hooks have seen its arguments."""
        from torch._dynamo.exc import TorchDynamoException  # it is imported with the compiler

        try:
            with given_angles(self._ropes, batch.positions):
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


def _call_of(forward: Forward) -> Forward:
    """The call of a block's forward; one code for all blocks, so that equal blocks have one graph."""

    def call(x: Any, batch: Batch) -> Any:
        return forward(x, batch)

    return call
