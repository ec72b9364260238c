"""Losses of recorded steps beside those of one device, kept in the folder of the run. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.disk import replace_file
from weft.errors import Fault, UserError
from weft.small_files import UnreadableFile
from weft.train.event_lines import read_events, to_line

FILE = "one_device.jsonl"
EVENT = "one_device"


@dataclass(frozen=True)
class StepLosses:
    """The loss of one step, of the run and of one device.

    Attributes:
        recorded: of the run.
        alone: of one device.
        bound: largest relative difference that rounding explains.
    """

    step: int
    recorded: float
    alone: float
    bound: float

    @property
    def relative(self) -> float:
        """Their difference, relative to one device."""
        return relative_difference(self.recorded, self.alone)

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.relative <= self.bound


def relative_difference(actual: float, expected: float) -> float:
    """Absolute difference over the expected magnitude; infinite if one number alone is not finite,
    0 if neither is: gradients that overflow have a norm of inf or NaN, by the order of sums.
    """
    num_finite = math.isfinite(actual) + math.isfinite(expected)
    if num_finite == 0:
        return 0.0
    if num_finite == 1:
        return math.inf
    return abs(actual - expected) / max(abs(expected), 1e-30)


def keep_losses(folder: Path, losses: Sequence[StepLosses]) -> None:
    """Write the losses into the folder of their run, beside those that it keeps of other steps.

    A folder that this user may not write, such as a run of others, stays as it is.
    """
    old: Sequence[StepLosses] = ()
    with suppress(UserError):
        old = _read(folder / FILE)
    by_step = {each.step: each for each in (*old, *losses)}
    lines = [to_line({"event": EVENT, **asdict(by_step[step])}) for step in sorted(by_step)]
    with suppress(OSError):
        replace_file(folder / FILE, "".join(lines))


def kept_losses(folder: Path, recorded: Mapping[int, float]) -> tuple[StepLosses, ...]:
    """The losses that a folder keeps, of steps that the run still has with the same loss; () without
    a file. A run may have trained a step again since, on another layout.

    Args:
        recorded: step -> loss of the run.

    Raises:
        UserError: the file is damaged.
    """
    kept = _read(folder / FILE)
    return tuple(each for each in kept if _is_same(recorded.get(each.step), each.recorded))


def _is_same(loss: float | None, other: float) -> bool:
    return loss is not None and (loss == other or (math.isnan(loss) and math.isnan(other)))


def _read(path: Path) -> tuple[StepLosses, ...]:
    try:
        return tuple(map(_losses_of, read_events(path)))
    except UnreadableFile as error:
        if error.is_missing:
            return ()
        reason = error.what
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        reason = str(error).removeprefix(f"{path}:")
    fix = "remove it, and compare again with weft prove RUN"
    raise UserError(Fault(str(path), f"cannot be read: {reason}", fix=fix))


def _losses_of(event: Mapping[str, Any]) -> StepLosses:
    recorded, alone, bound = (float(event[name]) for name in ("recorded", "alone", "bound"))
    if not bound > 0:
        raise ValueError(f"a bound of {bound}")
    return StepLosses(int(event["step"]), recorded, alone, bound)
