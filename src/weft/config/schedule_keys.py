"""Keys that follow from `pipeline.schedule`: the number of chunks, and path and content of a schedule file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from weft.config.keys import Flat
from weft.errors import Fault, UserError
from weft.schedule.catalog import SCHEDULES, find
from weft.schedule.table_file import table_lines

SCHEDULE = "pipeline.schedule"
TABLE = "pipeline.table"
CHUNKS = "pipeline.chunks"


@dataclass(frozen=True)
class ScheduleKeys:
    """What a config says about its schedule, completed.

    Attributes:
        defaults: for keys that the config does not set.
        decided: values that replace those of the config.
    """

    defaults: Flat = field(default_factory=dict)
    decided: Flat = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def schedule_keys(asked: Flat, flags: Flat) -> ScheduleKeys:
    """The keys of the schedule that is asked for. A run that is started from its run.toml has the
    content of the file that it was first started with, unless a flag names another file.

    A file that cannot be read is left to the checks of the config.

    Args:
        asked: file and flags.
        flags: flags alone.
    """
    name = asked.get(SCHEDULE)
    is_renamed = SCHEDULE in flags and TABLE not in flags
    if is_renamed:
        lines = ()
    else:
        lines = asked.get(TABLE, ())
    if not isinstance(name, str) or name in SCHEDULES:
        return _of_public_name(name, has_lines=bool(lines))
    path = os.path.abspath(name)
    try:
        table = find(path, tuple(lines)).file_table
    except (UserError, OSError, TypeError, ValueError):
        return ScheduleKeys(decided={TABLE: ()} if is_renamed else {})
    assert table is not None, f"{path} is no public name"
    return ScheduleKeys(
        defaults={CHUNKS: table.num_stages // table.num_ranks},
        decided={SCHEDULE: path, TABLE: table_lines(table)},
    )


def _of_public_name(name: object, *, has_lines: bool) -> ScheduleKeys:
    faults: tuple[Fault, ...] = ()
    if has_lines:
        if name is not None:
            shown = f"{SCHEDULE} is {name!r}"
        else:
            shown = f"{SCHEDULE} is not set"
        what = f"is set, and {shown}, which has no file"
        faults = (Fault(TABLE, what, fix=f"--{SCHEDULE} FILE"),)
    schedule = SCHEDULES.get(str(name))
    if schedule is not None:
        defaults = {CHUNKS: schedule.default_chunks}
    else:
        defaults = {}
    return ScheduleKeys(defaults=defaults, decided={TABLE: ()}, faults=faults)
