"""Schedule files: reading a table from a text or JSON file, checked and limited in size; writing one as text.

microbatches 2                     micro-batches of a step
stage_to_rank 0 1                  stage s runs on the s-th of these ranks
rank 0: F0.0 F0.1 B0.0 B0.1        one line a rank: its actions in order, F, B, I or W, stage.micro-batch
rank 1: F1.0 I1.0 W1.0 F1.1 B1.1   each backward is whole (B), or split into I and W
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from weft.errors import Fault, ScheduleError, counted
from weft.schedule.actions import KEY, Table
from weft.schedule.validate_table import validate
from weft.small_files import MIB, UnreadableFile, parse_json, read_text

MAX_FILE_BYTES = 4 * MIB
"""Size of the largest file: JSON files of `weft schedule --json` also hold a timeline."""
MAX_TEXT_BYTES = 2**18
"""Size of the largest table as text, about 30,000 actions: it is stored in the config of a run."""

TableLines = tuple[str, ...]
"""The lines of a table's text, as a config and a plan store them."""


def read_table(path: Path) -> Table:
    """The valid table of a text file, or of a JSON file of `weft schedule --json`.

    Raises:
        ScheduleError: the file cannot be read, or `check_table` rejects its table.
    """
    try:
        text = read_text(path, max_bytes=MAX_FILE_BYTES)
    except UnreadableFile as error:
        raise ScheduleError(error.fault(KEY)) from None
    table = _from_json(text, path) if text.lstrip().startswith("{") else _parse(text)
    check_table(table)
    return table


def table_of(lines: Sequence[str]) -> Table:
    """The valid table of these lines.

    Raises:
        ScheduleError: a line cannot be read, or `check_table` rejects the table.
    """
    table = _parse("\n".join(lines))
    check_table(table)
    return table


@functools.lru_cache(maxsize=4)
def _parse(text: str) -> Table:
    """`Table.parse`, once for a file that a start reads several times."""
    return Table.parse(text)


def table_lines(table: Table) -> TableLines:
    """The lines that `table_of` reads back."""
    return tuple(table.text.splitlines())


def check_table(table: Table) -> None:
    """Check a table of unknown origin: its size first, so that the other checks end soon.

    Raises:
        ScheduleError: it is too large, incomplete, deadlocks, or ranks own unequal numbers of
            stages.
    """
    # before `validate`, whose lists are as long as stages times micro-batches say, which a short file can name
    fault = _size_fault(table)
    if fault is not None:
        raise ScheduleError(fault)
    validate(table)
    counts = Counter(table.stage_to_rank)
    if len(set(counts.values())) > 1:
        owned = [str(counts[rank]) for rank in range(table.num_ranks)]
        fault = Fault(
            KEY,
            "ranks own different numbers of stages",
            got=f"{', '.join(owned[:8])} stages on ranks 0, 1, ...",
            need="the same number on each",
            fix="correct 'stage_to_rank'",
        )
        raise ScheduleError(fault)


def _size_fault(table: Table) -> Fault | None:
    num_actions = sum(map(len, table.rows))
    least = 2 * table.num_stages * table.microbatches
    if num_actions < least:
        actions = counted(num_actions, "action")
        stages = counted(table.num_stages, "stage")
        micro_batches = counted(table.microbatches, "micro-batch", "micro-batches")
        return Fault(
            KEY,
            "the table lacks actions",
            got=f"{actions}, {stages}, {micro_batches}",
            need=f"at least {least}: a forward and a backward of each",
            fix="add them, or correct 'microbatches' and 'stage_to_rank'",
        )
    num_bytes = len(table.text)
    if num_bytes > MAX_TEXT_BYTES:
        return Fault(
            KEY,
            "the table is too large",
            got=f"{num_actions} actions, {num_bytes} bytes as text",
            need=f"at most {MAX_TEXT_BYTES} bytes",
            fix="use fewer micro-batches or stages",
        )
    return None


def _from_json(text: str, path: Path) -> Table:
    try:
        fields = parse_json(text)
        table_fields = fields.get("table", fields)
        return Table.from_json(json.dumps(table_fields))
    except (ValueError, KeyError, TypeError, AttributeError):
        fault = Fault(
            KEY,
            f"the JSON in {path} is not a table",
            need="a file of `weft schedule --json`, or a table as text",
            fix="weft schedule 1f1b --ranks 2 --json FILE, which writes one to start from",
        )
        raise ScheduleError(fault) from None
