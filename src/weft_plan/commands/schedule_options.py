"""The options of `weft schedule`: reading them, and rejecting those that the asked mode does not use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from weft.config.command_options import JsonOptions, read_options
from weft.errors import ConfigError, Fault
from weft.schedule.catalog import SCHEDULES

Mode = Literal["picture", "compare", "search"]
MODE_FLAGS = {"--compare": "compare", "--search": "search"}
DEFAULT_NAME = "1f1b"
USED_BY: dict[str, tuple[Mode, ...]] = {
    "width": ("picture",),
    "text": ("picture", "search"),
    "config": ("compare",),
    "memory_limit": ("search",),
    "seconds": ("search",),
}
"""Options that only some modes use."""


class ScheduleOptions(JsonOptions):
    """What `weft schedule` draws, compares or searches, and what it writes."""

    schedule: str = Field(
        DEFAULT_NAME, description=f"{', '.join(SCHEDULES)}, or a file with a table"
    )
    ranks: int | None = Field(
        None,
        ge=1,
        title="a whole number, at least 1",
        description="pipeline ranks; None: 4, or those of a file",
    )
    chunks: int | None = Field(
        None, ge=1, description="model chunks a rank; None: the schedule's default"
    )
    microbatches: int | None = Field(
        None,
        ge=1,
        title="a whole number, at least 1",
        description="micro-batches a step; None: 8, or those of a file",
    )
    compare: bool = Field(
        False, description="compare the named schedules, or all that take the sizes"
    )
    costs: tuple[str, ...] = Field(
        (),
        title="F=1 B=2, or F=1 I=1 W=1",
        examples=["F=1 B=2"],
        description="times of a rank's share of the model: F=1 B=2, F=1 I=1 W=1, or one number a stage",
    )
    message: str = Field("0", description="time of a message between ranks, in units of costs")
    config: str | None = Field(
        None,
        title="a config file",
        examples=["run.toml"],
        description="compare: the sizes of this run, and its bytes",
    )
    search: bool = Field(False, description="search the shortest table in a memory limit")
    memory_limit: tuple[float, ...] = Field(
        (),
        title="a number, or one a rank",
        examples=["4"],
        description="search: most micro-batches whose activations a rank holds; none: as many as ranks",
    )
    seconds: float = Field(20.0, ge=1, le=3600, description="search: time it may take")
    width: int | None = Field(
        None, ge=40, description="columns of the text picture; None: the screen's"
    )
    svg: str | None = Field(
        None,
        title="a file name",
        examples=["x.svg"],
        description="write the picture to this SVG file",
    )
    text: str | None = Field(
        None,
        title="a file name",
        examples=["my.schedule"],
        description="write the table to this schedule file",
    )


@dataclass(frozen=True)
class ScheduleWords:
    """The words of the command, read.

    Attributes:
        names: schedules, in order.
    """

    names: tuple[str, ...]
    options: ScheduleOptions
    mode: Mode


def read_words(words: Sequence[str]) -> ScheduleWords:
    """Read names and options.

    Raises:
        ConfigError: with every fault.
    """
    options, names = read_options(words, ScheduleOptions)
    if options.compare and options.search:
        fix = "one of them: a search compares its table with the built-in schedules"
        raise ConfigError(Fault("compare", "is set, and so is search", fix=fix))
    mode: Mode = "picture"
    if options.compare or options.search:
        mode = "compare" if options.compare else "search"
    faults = tuple(_faults(names, options, mode))
    if faults:
        raise ConfigError(*faults)
    if not names and ("schedule" in options.model_fields_set or mode == "picture"):
        names = [options.schedule]
    return ScheduleWords(names=tuple(names), options=options, mode=mode)


def _faults(names: Sequence[str], options: ScheduleOptions, mode: Mode) -> Iterator[Fault]:
    asked = options.model_fields_set
    if mode == "picture" and len(names) > 1:
        shown = " ".join(names)
        fix = f"weft schedule {shown} --compare"
        yield Fault("schedule", "takes one name, or --compare", got=shown, fix=fix)
    if names and "schedule" in asked:
        yield Fault("schedule", "is set, and a name is given", got=" ".join(names), fix="give one")
    if mode == "search" and (names or "schedule" in asked):
        got = " ".join(names) or options.schedule
        yield Fault("schedule", "is not used by --search", got=got, fix="leave it out")
    for name, modes in USED_BY.items():
        if name in asked and mode not in modes:
            need = " or ".join(f"--{other}" for other in modes if other != "picture")
            yield Fault(
                name,
                f"is not used by a {mode}",
                need=need or "a picture",
                fix=f"leave --{name} out, or add {need}" if need else f"leave --{name} out",
            )
    if options.config is not None:
        for name in ("ranks", "microbatches"):
            if name in asked:
                yield Fault(name, "is set, and --config has its value", fix=f"leave out --{name}")
