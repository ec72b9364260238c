"""Callbacks that report what a step is doing: its phase, the action of the schedule, the block of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.models.common.batch import activation_of
from weft.run.rank_status import OnBlock, Phase
from weft.schedule.actions import Act


def report_blocks(
    blocks: Mapping[str, nn.Module], on_block: OnBlock
) -> tuple[RemovableHandle, ...]:
    """Call `on_block` with the name of each block when its forward begins, and when its backward
    does: when the gradient of its output is known. The computation does not change.

    Returns:
        Handles that end it.
    """
    hooks: list[RemovableHandle] = []
    for name, block in blocks.items():
        before_forward = partial(_report_forward, on_block, name)
        before_backward = partial(_report_backward, on_block, name)
        hooks.append(block.register_forward_pre_hook(before_forward))
        hooks.append(block.register_forward_hook(before_backward))
    return tuple(hooks)


def _report_forward(on_block: OnBlock, name: str, module: nn.Module, args: object) -> None:
    on_block(name)


def _report_backward(
    on_block: OnBlock, name: str, module: nn.Module, args: object, output: object
) -> None:
    x = activation_of(output)
    if isinstance(x, Tensor) and x.requires_grad:

        def report(gradient: Tensor) -> None:
            on_block(name)

        x.register_hook(report)


def ignore_phase(phase: Phase) -> None:
    """Do nothing."""


def action_reporter(on_phase: Callable[[Phase], None] | None) -> Callable[[Act], None] | None:
    """A callback that reports the phase of an action; None if nothing listens."""
    if on_phase is None:
        return None

    def report(act: Act) -> None:
        on_phase("forward" if act.kind == "F" else "backward")

    return report
