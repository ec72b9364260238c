"""The error that ended the run of a layout as a difference of the proof: phase, block and axis as far as they are known."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Mapping, Sequence

from weft.core.mesh import Mesh
from weft.errors import UserError, WeftError, first_line
from weft.prove.record import RankRecord
from weft.prove.report import Difference, Phase
from weft.run.rank_status import Phase as StepPhase

MAX_TEXT = 400
SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
PHASE_OF_STEP: Mapping[StepPhase, Phase] = {
    "start": "forward",
    "data": "batch",
    "forward": "forward",
    "backward": "backward",
    "reduce": "reduce",
    "update": "update",
    "evaluate": "evaluation",
    "save": "checkpoint",
    "end": "update",
}


def error_text(error: BaseException) -> str:
    """The message of an error, in one line, with its type where that is none of weft's."""
    text = first_line(error)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} ..."
    return text if isinstance(error, WeftError) else f"{type(error).__name__}: {text}"


def is_fault_of_the_layout(error: BaseException, records: Sequence[RankRecord]) -> bool:
    """Whether an error says something about the layout: neither that the run could not be built at
    all, because of what it asks for, nor that this machine ran out of something.
    """
    is_shortage = isinstance(error, OSError) and error.errno in SHORTAGES
    if is_shortage or isinstance(error, MemoryError):
        return False
    has_begun = any(record.progress.has_begun for record in records)
    return has_begun or not isinstance(error, UserError)


def is_between_steps(records: Sequence[RankRecord]) -> bool:
    """Whether all ranks had computed whole steps, and saved or read back the last one, when an error
    ended them: then what they computed before it can be compared.
    """
    return all(
        record.progress.is_restoring or record.progress.phase == "save" for record in records
    )


def difference_of_error(
    error: BaseException, records: Sequence[RankRecord], *, mesh: Mesh, blocks: Sequence[str]
) -> Difference:
    """Where the run of a layout ended.

    Args:
        records: what the ranks computed until then.
        blocks: names of the blocks of the model.
    """
    failed = [record for record in records if record.error is error]
    record = failed[0] if failed else records[0]
    progress = record.progress
    parameter, block = _named(str(error), records, blocks)
    block = block or progress.block
    place = f"block {block}" if block else "step"
    phase: Phase = "checkpoint" if progress.is_restoring else PHASE_OF_STEP[progress.phase]
    return Difference(
        tensor=parameter or place,
        block=block,
        parameter=parameter,
        phase=phase,
        step=max(progress.step, 1),
        micro_batch=None,
        axis=_axis_of(str(error), mesh),
        ranks=tuple(each.rank for each in failed) or tuple(range(mesh.size)),
        collective="",
        relation="not computed: an error ends the layout",
        measured=math.inf,
        bound=0.0,
    )


def _named(text: str, records: Sequence[RankRecord], blocks: Sequence[str]) -> tuple[str, str]:
    """The first parameter, and its block, in a message; else the first block; "" where none is."""
    owners: set[str] = set()
    for record in records:
        owners.update(param.owner for param in record.shards.values())
    found = _first_name(text, sorted(owners))
    if found:
        return found, found.partition(".")[0]
    return "", _first_name(text, blocks)


def _first_name(text: str, names: Sequence[str]) -> str:
    """The name that comes first in a text; of several at one place the longest."""
    places: list[tuple[int, int, str]] = []
    for name in names:
        pattern = rf"(?<![\w.]){re.escape(name)}(?!\w)"
        match = re.search(pattern, text)
        if match is not None:
            places.append((match.start(), -len(name), name))
    if not places:
        return ""
    _, _, first = min(places)
    return first


def _axis_of(text: str, mesh: Mesh) -> str:
    """The mesh axis that a message names, or the only one; "" where there are several."""
    for axis in mesh.wide_axes:
        if re.search(rf"over {axis}\b", text):
            return axis
    return mesh.wide_axes[0] if len(mesh.wide_axes) == 1 else ""
