"""`weft status`: what a run is doing, from its lock, its status board and its events. Imports no torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from weft.checkpoint.folder import next_command
from weft.commands.console import check_files, print_json, print_result, show_help, wants_help
from weft.config import toml
from weft.config.command_options import JsonOptions, read_options
from weft.config.run_files import RUN_FILE
from weft.core.mesh import Mesh
from weft.errors import EXIT_OK, Fault, UserError, WeftError, printable
from weft.models import FAMILIES
from weft.run.folder_lock import FolderLock, find_lock
from weft.run.hang import diagnose
from weft.run.lock_holder import LockHolder
from weft.run.private_folder import is_private_file
from weft.run.process_state import STOPPED, process_state
from weft.run.rank_status import RankSnapshot, StatusBoard
from weft.small_files import UnreadableFile, open_regular, parse_json
from weft.view.progress import Progress
from weft.view.quantity import short_time

USAGE = "RUN [--watch] [--json]"
WATCH_S = 1.0
"""Between two looks of `--watch`."""
UNDER_WAY = ("running", "stuck")
MAX_DOUBLINGS = 6
"""Of the time that a rank may pause: at most one a restart, for whatever reason that was."""
LINE = "show whether a run is running, stuck, failed or done, and where"
EVENTS = "events.jsonl"
IMAGE_SIZE = "model.image_size"
"""Key of the models that read images."""
BOARD = "board"
"""Name of the status board in the private folder of a launcher."""
TAIL_BYTES = 1 << 18

NOW_S = 0.01
"""A shorter time since the last progress is shown as now."""

State = Literal["running", "stuck", "failed", "done", "stopped", "interrupted"]
DONE: State = "done"
STATES: dict[str, State] = {
    "finished": DONE,
    "failed": "failed",
    "stopped": "stopped",
    "interrupted": "interrupted",
}
"""Status of an `end` event -> state."""
NO_END = "no process runs, and the end of the run is not recorded (killed?)"
ENDED_STATES = ("", "Z", "X")
"""States of /proc/PID/stat of a process that has ended; "": there is no such process."""


class StatusOptions(JsonOptions):
    """How `weft status` prints."""

    watch: bool = Field(False, description="look every second, until the run has ended")


@dataclass(frozen=True)
class RankLine:
    """One rank of a run on this machine.

    Attributes:
        where: its mesh coordinates.
        place: step, phase and block, and the collective that it waits for.
        idle_s: time since its last progress.
    """

    rank: int
    where: str
    pid: int
    place: str
    idle_s: float
    is_stopped: bool

    def __str__(self) -> str:
        if not self.pid:
            return f"  rank {self.rank} ({self.where})  is being started"
        stopped = ", stopped" if self.is_stopped else ""
        if self.idle_s < NOW_S:
            idle = "now"
        else:
            idle = f"{short_time(self.idle_s)} ago"
        parts = [
            f"  rank {self.rank} ({self.where})",
            f"pid {self.pid}",
            f"{self.place}, {idle}{stopped}",
        ]
        return "  ".join(parts)


@dataclass(frozen=True)
class RunStatus:
    """What `weft status` shows.

    Attributes:
        text: of a stuck run the culprit, of a failed one the error.
        step: the last step that was finished, of `steps`.
        unit: what `tokens_per_s` counts: tokens, pairs or images.
        restarts: how often the ranks were started again.
        pid: the launcher, or the first rank of a world that torchrun or Slurm has started.
    """

    run: str
    state: State
    text: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    unit: str = "tokens"
    restarts: int = 0
    host: str = ""
    pid: int = 0
    ranks: tuple[RankLine, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The report, the state first."""
        if self.steps:
            steps = f"step {self.step} of {self.steps}"
        else:
            steps = f"step {self.step}"
        parts = [self.state, steps]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} {self.unit}/s")
        if self.restarts:
            parts.append(f"restarts {self.restarts}")
        if self.pid:
            parts.append(f"process {self.pid} on {self.host}")
        yield f"{self.run}: {', '.join(parts)}"
        if self.text:
            yield f"  {self.text}"
        for rank in self.ranks:
            yield str(rank)


def status(words: Sequence[str]) -> int:
    """Print the status of a run.

    Raises:
        UserError: there is no run in the folder.
    """
    if wants_help(words) or not words:
        return show_help(StatusOptions(), f"weft status {USAGE}", LINE)
    options, places = read_options(words, StatusOptions)
    check_files(options, "json")
    if len(places) != 1:
        got = " ".join(places) or "nothing"
        fix = "name the folder that the run printed"
        raise UserError(Fault("weft status", "takes one run folder", got=got, fix=fix))
    if options.watch:
        if options.json is not None:
            raise UserError(
                Fault("watch", "is for text", got="--json", fix="leave one of both out")
            )
        return _watch(Path(places[0]))
    found = run_status(Path(places[0]), now_s=time.monotonic())
    if options.json is not None:
        return print_json(options.json, found.to_json())
    return print_result("\n".join(_printable_lines(found)))


def _watch(folder: Path) -> int:
    """Redraw the status until the run has ended; into a pipe or file it is written when it changes."""
    from rich.console import Console  # late: 50 ms to import
    from rich.text import Text

    from weft.view.live import LiveRegion

    console = Console(highlight=False)
    region = LiveRegion(console)
    before: list[str] = []
    while True:
        found = run_status(folder, now_s=time.monotonic())
        lines = _printable_lines(found)
        if console.is_terminal:
            region.draw([Text(line) for line in lines])
        elif lines != before:
            print_result("\n".join(lines))
        if found.state not in UNDER_WAY:
            return EXIT_OK
        before = lines
        time.sleep(WATCH_S)


def _printable_lines(found: RunStatus) -> list[str]:
    """The report, without control characters: events and locks may be anyone's."""
    return list(map(printable, "\n".join(found.lines()).splitlines()))


def run_status(folder: Path, *, now_s: float) -> RunStatus:
    """The status of the run in a folder; `now_s` is time.monotonic().

    Raises:
        UserError: there is no run in the folder.
    """
    return status_of(folder, _last_events(folder / EVENTS), _config(folder), now_s=now_s)


def status_of(
    folder: Path, events: Sequence[dict[str, Any]], config: Mapping[str, Any], *, now_s: float
) -> RunStatus:
    """As `run_status`, of a run whose last events and whose config have been read already.

    Raises:
        UserError: there is no run in the folder.
    """
    lock = find_lock(folder) if folder.is_dir() else None
    is_run = (folder / RUN_FILE).is_file() and (folder / EVENTS).is_file()
    if lock is None and not events and is_run:
        text = "no event of the run is recorded, or none can be read (killed at its start?)"
        return RunStatus(run=str(folder), state="failed", text=text)
    if lock is None and not events:
        fault = Fault(
            "weft status",
            "there is no run here",
            got=repr(str(folder)),
            need="a run folder",
            fix="name the folder that the run printed, such as runs/first",
        )
        raise UserError(fault)
    steps = config.get("steps")
    found = RunStatus(
        run=str(folder),
        state="running",
        steps=steps if isinstance(steps, int) else 0,
        unit=unit_of(config),
        restarts=_num_restarts(events),
    )
    found = _with_progress(found, events)
    if lock is None or lock.state() != "held":
        return _ended(found, events)
    return _running(found, lock, config, now_s=now_s)


def _with_progress(found: RunStatus, events: Sequence[dict[str, Any]]) -> RunStatus:
    """The status with the last step of the events, and the speed that views of the run show."""
    progress = Progress()
    for event in events:
        if event.get("event") == "step" and isinstance(event.get("step"), int):
            progress.update(event)
    if not progress.step:
        return found
    return replace(
        found,
        step=progress.num_done,
        loss=_number(progress.step.get("loss")),
        tokens_per_s=progress.tokens_per_s if math.isfinite(progress.tokens_per_s) else None,
    )


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    return None


def _num_restarts(events: Sequence[dict[str, Any]]) -> int:
    """How often the ranks were started again since the start (or resume) of the run."""
    count = 0
    for event in events:
        if event.get("event") == "run":
            count = 0
        elif event.get("event") == "restart":
            count += 1
    return count


def _ended(found: RunStatus, events: Sequence[dict[str, Any]]) -> RunStatus:
    """The status of a run that no process writes."""
    folder = Path(found.run)
    last = events[-1] if events else {}
    if last.get("event") != "end":
        return replace(found, state="failed", text=_joined(NO_END, next_command(folder)))
    state = STATES.get(str(last.get("status")), "failed")
    text = str(last.get("error") or last.get("text") or "")
    if state == "interrupted":
        text = _joined(text, next_command(folder))
    return replace(found, state=state, text=text)


def _joined(*texts: str) -> str:
    """Those of the texts that are not empty, a line each."""
    return "\n  ".join(text for text in texts if text)


def _running(
    found: RunStatus, lock: FolderLock, config: Mapping[str, Any], *, now_s: float
) -> RunStatus:
    """The status of a run that a process writes, with its ranks if they are on this machine."""
    holder = lock.holder
    if holder is None:
        return found
    found = replace(found, host=holder.host, pid=holder.pid)
    board = _board(lock, holder)
    if board is None:
        return found
    mesh = _mesh(config)
    snapshots = [board.read(rank) for rank in range(board.num_ranks)]
    states = [process_state(snapshot.pid) for snapshot in snapshots]
    idle_s: list[float] = []
    lines: list[RankLine] = []
    ended: set[int] = set()
    for snapshot, state in zip(snapshots, states, strict=True):
        is_started = snapshot.pid > 0
        if is_started:
            rank_idle_s = max(0.0, now_s - 1e-9 * snapshot.changed_ns)
        else:
            rank_idle_s = 0.0
        idle_s.append(rank_idle_s)
        if is_started and state.state in ENDED_STATES:
            ended.add(snapshot.rank)
        lines.append(
            RankLine(
                rank=snapshot.rank,
                where=mesh.coord_text(snapshot.rank) if mesh.size == board.num_ranks else "no mesh",
                pid=snapshot.pid,
                place=_place(snapshot),
                idle_s=rank_idle_s,
                is_stopped=state.state == STOPPED,
            )
        )
    restarts = max(snapshot.attempt for snapshot in snapshots)
    found = replace(found, ranks=tuple(lines), restarts=restarts)
    hang = diagnose(
        snapshots,
        ended=frozenset(ended),
        states=states,
        stalled_s=idle_s,
        timeout_s=_number(config.get("run.timeout_s")) or 0.0,
        patience=2 ** min(restarts, MAX_DOUBLINGS),
    )
    if hang is None:
        return found
    culprit = hang.ranks[0]
    return replace(
        found, state="stuck", text=f"rank {culprit} ({lines[culprit].where}): {hang.text}"
    )


def _mesh(config: Mapping[str, Any]) -> Mesh:
    """The mesh of a config; one rank if it cannot be read."""
    try:
        return Mesh.parse(str(config.get("mesh", "")))
    except WeftError:
        return Mesh.parse("")


def _place(snapshot: RankSnapshot) -> str:
    if snapshot.waiting is None or snapshot.waiting.is_on_device:
        return snapshot.place
    return f"{snapshot.place}, in {snapshot.waiting.text}"


def _board(lock: FolderLock, holder: LockHolder) -> StatusBoard | None:
    """The board of a run on this machine; None if there is none (any more), or if the lock names a
    file that no launcher of its owner has made.
    """
    if holder.status_board is None or not holder.is_on_this_machine():
        return None
    path = Path(holder.status_board)
    try:
        owner = os.lstat(lock.path).st_uid
        if path.name != BOARD or not is_private_file(path, owner=owner):
            return None
        return StatusBoard.open(path)
    except (OSError, ValueError):
        return None


def _config(folder: Path) -> dict[str, Any]:
    """The dotted keys of the run's config; none if it cannot be read."""
    try:
        return dict(toml.read(str(folder / "run.toml")))
    except (WeftError, OSError):
        return {}


def unit_of(config: Mapping[str, Any]) -> str:
    """What a run with these keys counts."""
    if config.get("loss") == "dpo":
        return "answers" if config.get("dpo.loss_type") == "kto" else "pairs"
    name = str(config.get("model.name"))
    if name in tuple(FAMILIES):
        return "images" if FAMILIES[name].Config.kind == "images" else "tokens"
    return "images" if IMAGE_SIZE in config else "tokens"  # a user's code is not imported here


def _last_events(path: Path) -> list[dict[str, Any]]:
    """The events at the end of a file, without lines that are cut or damaged."""
    try:
        with open_regular(path, within=path.parent) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except UnreadableFile:
        return []
    events: list[dict[str, Any]] = []
    for line in data.split(b"\n"):
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
