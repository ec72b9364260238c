"""The profiles of a run folder: `RUN/profile/1`, `2` ..., one for each start that reached the steps. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.config.profiled_steps import KEY
from weft.config.run_files import stored_config
from weft.core.mesh import Mesh
from weft.errors import Fault, UserError, counted
from weft.profiler.rank_records import RankRecords, file_name, read_records

FOLDER = "profile"
CONFIG_FILE = "run.toml"
"""The config of the start that was profiled, beside the records."""
PLAN_FILE = "plan.json"
RECORDS = "rank-*.jsonl"
"""Files of ranks."""
MOST_NAMED = 3
"""Missing files that a message names."""


@dataclass(frozen=True)
class Profile:
    """What all ranks did.

    Attributes:
        folder: of its files.
        ranks: the records of every rank, in rank order.
    """

    folder: Path
    mesh: Mesh
    ranks: tuple[RankRecords, ...]

    @property
    def number(self) -> int:
        """The number of the profile in its run."""
        return self.ranks[0].header.profile

    @property
    def num_left_out(self) -> int:
        """Records that the limit of a rank left out."""
        return sum(rank.header.num_left_out for rank in self.ranks)

    @property
    def clock_error_s(self) -> float:
        """By which the clocks of two hosts may differ."""
        return max(rank.header.offset_error_s for rank in self.ranks)


def new_profile_folder(run_folder: Path) -> Path:
    """Create the folder of the next profile of a run; those that exist stay as they are."""
    number = max(profile_numbers(run_folder), default=0) + 1
    while True:
        folder = run_folder / FOLDER / str(number)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def profile_numbers(run_folder: Path) -> list[int]:
    """The profiles of a run, ascending."""
    folder = run_folder / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def read_profile(run_folder: Path, number: int | None = None) -> Profile:
    """A profile of a run; default: the newest whose records are all there.

    Raises:
        UserError: there is none, or records are missing or damaged.
    """
    numbers = profile_numbers(run_folder)
    if not numbers:
        fix = "resume the run with --profile and steps that are still to come"
        what = "no steps of the run were recorded"
        wanted = stored_config(run_folder).get(KEY)
        if wanted is not None:
            what = f"{what}: it has not begun with steps {wanted}"
            fix = f"wait for the end of these steps, or {fix}"
        raise UserError(Fault(str(run_folder), what, need=f"a folder {FOLDER}", fix=fix))
    if number is None:
        number = next(
            (each for each in reversed(numbers) if _is_whole(run_folder, each)), numbers[-1]
        )
    elif number not in numbers:
        need = f"one of {', '.join(map(str, numbers))}"
        fix = f"--number {numbers[-1]}"
        raise UserError(Fault("number", "there is no such profile", str(number), need, fix))
    folder = run_folder / FOLDER / str(number)
    if not any(folder.glob(RECORDS)):
        what = "has no records yet: they are written when the last step has ended"
        fix = "wait for that; of a run that was killed before, resume it with --profile and later steps"
        raise UserError(Fault(str(folder), what, fix=fix))
    first = _records_of(folder, rank=0)
    mesh = Mesh.parse(first.header.mesh)
    _check_complete(folder, mesh.size)
    others = [_records_of(folder, rank=rank) for rank in range(1, mesh.size)]
    return Profile(folder, mesh, (first, *_on_one_clock(first, others)))


def _is_whole(run_folder: Path, number: int) -> bool:
    folder = run_folder / FOLDER / str(number)
    if not (folder / file_name(0)).is_file():
        return False
    mesh = Mesh.parse(_records_of(folder, rank=0).header.mesh)
    return not _missing(folder, mesh.size)


def _missing(folder: Path, num_ranks: int) -> list[int]:
    """The first ranks without a file."""
    found = (rank for rank in range(num_ranks) if not (folder / file_name(rank)).is_file())
    return list(itertools.islice(found, MOST_NAMED + 1))


def _check_complete(folder: Path, num_ranks: int) -> None:
    """Every rank has its file.

    Raises:
        UserError: files are missing.
    """
    missing = _missing(folder, num_ranks)
    if missing:
        got = f"no {', '.join(map(file_name, missing[:MOST_NAMED]))}"
        got += " ..." if missing[MOST_NAMED:] else ""
        need = counted(num_ranks, "file")
        fix = "copy them from the hosts of these ranks, which have the folder of the same name"
        raise UserError(Fault(str(folder), "records of ranks are missing", got, need, fix))


def _records_of(folder: Path, *, rank: int) -> RankRecords:
    path = folder / file_name(rank)
    if not path.is_file():
        _check_complete(folder, rank + 1)
    return read_records(path)


def _on_one_clock(first: RankRecords, others: Sequence[RankRecords]) -> list[RankRecords]:
    """Records with times after the origin of rank 0."""
    return [each.shifted(each.header.origin_s - first.header.origin_s) for each in others]
