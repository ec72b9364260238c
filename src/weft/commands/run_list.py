"""The runs below a folder, and what each has reached: read from their run.toml and events, nothing is imported or written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.commands.status import EVENTS, RunStatus, run_status
from weft.config.run_files import RUN_FILE, stored_config
from weft.errors import Fault, UserError

MAX_DEPTH = 4
"""Folders between the one that is named and a run."""
SKIPPED = ("ckpt",)
"""Folders of a run, which hold no other run."""


@dataclass(frozen=True)
class ListedRun:
    """One run of a list.

    Attributes:
        name: its folder, below the one that was searched.
        layout: its mesh; "" for one rank.
        age_s: time since its last event.
        size_bytes: of all its files.
    """

    name: str
    folder: Path
    status: RunStatus
    model: str
    layout: str
    age_s: float
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The fields, those of `weft status` among them."""
        names = ("name", "model", "layout", "age_s", "size_bytes")
        fields = {name: getattr(self, name) for name in names}
        status = self.status.to_json()
        kept = ("state", "text", "step", "steps", "loss", "tokens_per_s", "unit", "restarts")
        return {**fields, "folder": str(self.folder), **{name: status[name] for name in kept}}


def run_folder_of(word: str, *, command: str) -> Path:
    """The run folder that a word names, or whose run.toml it names.

    Raises:
        UserError: there is no run.
    """
    path = Path(os.path.expanduser(word))
    folder = path.parent if path.name == RUN_FILE else path
    if (folder / RUN_FILE).is_file() and (folder / EVENTS).is_file():
        return folder
    fix = "name the folder that the run printed, such as runs/first"
    need = f"a run folder, with {RUN_FILE} and {EVENTS}"
    raise UserError(Fault(command, "there is no run here", got=repr(word), need=need, fix=fix))


def find_runs(root: Path) -> Iterator[ListedRun]:
    """The runs below a folder, or in it, in the order of their names."""
    for folder in run_folders(root):
        yield listed_run(
            folder,
            root,
            status=run_status(folder, now_s=time.monotonic()),
            config=stored_config(folder),
            size_bytes=size_of(folder),
        )


def listed_run(
    folder: Path, root: Path, *, status: RunStatus, config: Mapping[str, Any], size_bytes: int
) -> ListedRun:
    """The run of a folder below `root`, as its parts that are read already say it."""
    mesh = config.get("mesh", "")
    return ListedRun(
        name=str(folder.relative_to(root)) if folder != root else folder.name,
        folder=folder,
        status=status,
        model=str(config.get("model.preset") or config.get("model.name", "")),
        layout=mesh if isinstance(mesh, str) else "",
        age_s=max(0.0, time.time() - (folder / EVENTS).stat().st_mtime),
        size_bytes=size_bytes,
    )


def run_folders(folder: Path, *, depth: int = 0) -> Iterator[Path]:
    """The folders of runs below a folder, or itself, in the order of their names."""
    if (folder / RUN_FILE).is_file() and (folder / EVENTS).is_file():
        yield folder
    if depth == MAX_DEPTH:
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if _is_searched(entry))
    except OSError:  # a folder that this user may not read
        return
    for name in names:
        yield from run_folders(folder / name, depth=depth + 1)


def _is_searched(entry: os.DirEntry[str]) -> bool:
    is_hidden = entry.name.startswith(".")
    return entry.is_dir(follow_symlinks=False) and not is_hidden and entry.name not in SKIPPED


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder; files that vanish meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
