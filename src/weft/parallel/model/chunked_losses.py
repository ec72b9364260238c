"""Heads that compute the losses of the targets chunk by chunk, in place of logits, where the plan says so."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.layout.compilation import NOT_COMPILED
from weft.layout.plan import Plan
from weft.models.common.head_output import (
    ChunkedLosses,
    HasVocabulary,
    PlainLosses,
    WholeVocabulary,
    heads_with_losses,
    set_head_output,
)
from weft.models.common.preference import PreferenceLoss
from weft.schedule.actions import Table
from weft.schedule.simulate import ACTIVATION_CHANGE


def use_chunked_losses(blocks: Mapping[str, nn.Module], plan: Plan, *, device: str) -> None:
    """Have the heads of these blocks, which are parallel already, compute losses without whole logits;
    not in blocks that are compiled.

    Args:
        device: type of the device that they run on.
    """
    if not plan.chunked_losses:
        return
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.blocks}
    is_compiled = plan.compiles_blocks(device)
    for name, head, loss in list(heads_with_losses(blocks)):
        if is_compiled and name not in NOT_COMPILED:
            continue
        is_of_sum = not isinstance(loss, PreferenceLoss)
        is_ahead = is_of_sum and most_in_flight(plan.table, stage_of[name]) == 1
        vocabulary = _vocabulary_of(head.proj)  # type: ignore[arg-type]
        if vocabulary is None:
            set_head_output(head, PlainLosses())
        else:
            output = ChunkedLosses(vocabulary, is_ahead, is_compiled=is_compiled)
            set_head_output(head, output)


def _vocabulary_of(proj: nn.Module) -> WholeVocabulary | None:
    """The entries of a projection's rank; None: it is row-parallel, and its logits are whole."""
    if isinstance(proj, HasVocabulary):
        return proj.vocabulary()
    return WholeVocabulary() if isinstance(proj, nn.Linear) else None


def most_in_flight(table: Table, stage: int) -> int:
    """The most micro-batches whose forward has run through a stage, and whose backward has not."""
    row = table.rows[table.stage_to_rank[stage]]
    most = now = 0
    for act in row:
        if act.stage == stage:
            now += ACTIVATION_CHANGE[act.kind]
            most = max(most, now)
    return most
