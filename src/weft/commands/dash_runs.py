"""The runs below a folder as `weft dash` follows them: new lines alone are read, and what is kept of a run is bounded."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from weft.commands.report_page import MAX_RUNS
from weft.commands.run_list import ListedRun, listed_run, run_folders, size_of
from weft.commands.runs import KEYS, Column, run_cells
from weft.commands.status import EVENTS, TAIL_BYTES, UNDER_WAY, RunStatus, status_of
from weft.config.keys import Flat
from weft.config.run_files import RUN_FILE, stored_config
from weft.errors import Fault, UserError
from weft.prove.losses import FILE as LOSSES
from weft.report.live_list import ListRow, list_page
from weft.report.page import LiveSource, report_page
from weft.report.recorded_values import RunRecord
from weft.report.run_history import RunHistory
from weft.small_files import UnreadableFile, is_regular_within, parse_json
from weft.train.appended_lines import AppendedLines, FileStamp
from weft.train.event_lines import parse_run_event
from weft.view.progress import NUM_RECENT

Key = TypeVar("Key")

LOOK_S = 1.0
"""Between two looks at the same files, at least."""
SIZE_S = 30.0
"""Between two counts of the bytes of a run that goes on."""
MOST_STARTS = 1000
"""Starts and restarts of one run that are kept for its status, the newest."""
MOST_OPEN = 2 * MAX_RUNS
"""Runs whose steps are kept in memory: those whose pages were asked for last."""
MOST_PAGES = 4
"""Pages that are kept until their runs change."""
RUN_ITSELF = "."
"""Key of a run in the folder that is searched."""


class FollowedStatus:
    """The row of a run, from the end of its events and what was appended since."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        self._lines = AppendedLines(folder / EVENTS, tail_bytes=TAIL_BYTES)
        self._config: Flat = {}
        self._config_stamp = FileStamp()
        self._size_bytes = 0
        self._sized_at_s = self._looked_at_s = -float("inf")
        self._run: ListedRun | None = None
        self._forget()

    def _forget(self) -> None:
        self._starts: deque[dict[str, Any]] = deque(maxlen=MOST_STARTS)
        self._steps: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT + 1)
        self._last: dict[str, Any] = {}

    def look(self, now_s: float) -> ListedRun:
        """The run as it is, or as it was within the last second; `now_s` is time.monotonic().

        Raises:
            UserError, OSError: there is no such run any more.
        """
        if self._run is None or now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self._run = self._read(now_s)
        return self._run

    def _read(self, now_s: float) -> ListedRun:
        has_grown = self._read_events()
        stamp = FileStamp.of(self._folder / RUN_FILE)
        if stamp != self._config_stamp:
            self._config, self._config_stamp = stored_config(self._folder), stamp
        if has_grown and now_s - self._sized_at_s >= SIZE_S:
            self._size_bytes, self._sized_at_s = size_of(self._folder), now_s
        return listed_run(
            self._folder,
            self._root,
            status=self._status(now_s, has_grown=has_grown),
            config=self._config,
            size_bytes=self._size_bytes,
        )

    def _status(self, now_s: float, *, has_grown: bool) -> RunStatus:
        """The status; that of a run that has ended and is not resumed is the one from before."""
        if self._run is not None and not has_grown and self._run.status.state not in UNDER_WAY:
            return self._run.status
        events = [*self._starts, *self._steps]
        if self._last.get("event") not in (None, "run", "restart", "step"):
            events.append(self._last)
        return status_of(self._folder, events, self._config, now_s=now_s)

    def _read_events(self) -> bool:
        """Whether there are new ones; lines that are damaged are left out."""
        has_grown = self._lines.was_replaced()
        if has_grown:
            self._forget()
        for line in self._lines.read_all():
            has_grown = True
            try:
                event = parse_json(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                self._add(event)
        return has_grown

    def _add(self, event: dict[str, Any]) -> None:
        self._last = event
        match event.get("event"):
            case "step":
                self._steps.append(event)
            case "run":
                self._starts.clear()
                self._starts.append(event)
            case "restart":
                self._starts.append(event)


class FollowedHistory:
    """All steps of a run, from its events and what was appended since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = AppendedLines(folder / EVENTS)
        self._history = RunHistory()
        self._damage = ""

    def look(self, *, state: str) -> RunRecord:
        """The run as it is.

        Raises:
            UserError: its events are damaged, or cannot be read.
        """
        if self._lines.was_replaced():
            self._history, self._damage = RunHistory(), ""
        try:
            for line in self._lines.read():
                self._history.add(parse_run_event(line))
        except (ValueError, UnreadableFile) as error:
            self._damage = self._damage or str(error)
        if self._damage:
            what = f"the events cannot be read: {self._damage}"
            raise UserError(Fault(self._folder.name, what))
        return RunRecord.of(self._history, self._folder, state=state)


class FollowedRuns:
    """All runs below a folder. Its methods may be called from several threads."""

    def __init__(self, root: Path) -> None:
        self._root = Path(root.resolve())
        self._title = str(root)
        self._lock = threading.Lock()
        self._rows: dict[Path, FollowedStatus] = {}
        self._listed: list[ListedRun] = []
        self._listed_at_s = -float("inf")
        self._open: OrderedDict[Path, FollowedHistory] = OrderedDict()
        self._pages: OrderedDict[tuple[str, ...], tuple[str, str]] = OrderedDict()

    def list_version(self) -> str:
        """A text that is another one when the list is another one, or a minute has passed."""
        with self._lock:
            return self._version_of_list()

    def runs_version(self, keys: Sequence[str]) -> str:
        """A text that is another one when the page of these runs is another one.

        Raises:
            UserError: a key names no run.
        """
        with self._lock:
            return self._version_of(keys)

    def list_page(self, sort: Column) -> str:
        """The page of all runs, sorted by a column."""
        with self._lock:
            version = self._version_of_list()
            found = sorted(self._listed, key=KEYS[sort])
        live = LiveSource("/changes", version)
        rows = [self._row(run) for run in found]
        return list_page(
            rows, live, title=self._title, columns=tuple(KEYS), sort=sort, most=MAX_RUNS
        )

    def runs_page(self, keys: Sequence[str]) -> str:
        """The page of one run, or of several over each other.

        Raises:
            UserError: a key names no run, or the events of one are damaged.
        """
        with self._lock:
            version = self._version_of(keys)
            kept_version, page = self._pages.get(tuple(keys), ("", ""))
            if kept_version != version:
                records = [self._record(self._folder(key)) for key in keys]
                live = LiveSource(f"/changes?{_query(keys)}", version)
                page = report_page(records, live=live)
            self._pages[tuple(keys)] = version, page
            _drop_oldest(self._pages, tuple(keys), most=MOST_PAGES)
            return page

    def _folder(self, key: str) -> Path:
        """The folder that a key names: a run below the root, without links on the way.

        Raises:
            UserError: there is none.
        """
        parts = [] if key == RUN_ITSELF else key.split("/")
        folder = self._root.joinpath(*parts)
        is_plain = "\0" not in key and not {"", ".", ".."} & set(parts)
        if not is_plain or Path(folder.resolve()) != folder or not _is_run(folder):
            raise UserError(Fault("run", "there is no such run", got=repr(key)))
        return folder

    def _row(self, run: ListedRun) -> ListRow:
        key = self._key(run)
        return ListRow(key, f"/report?{_query([key])}", tuple(run_cells(run)))

    def _key(self, run: ListedRun) -> str:
        return str(run.folder.relative_to(self._root))

    def _version_of_list(self) -> str:
        self._look()
        rows = [
            (self._key(run), run.status.to_json(), run.layout, run.size_bytes)
            for run in self._listed
        ]
        return _digest([int(time.time() // 60), rows])

    def _look(self) -> None:
        """Look for runs, and at each; names that are no UTF-8 are left out."""
        now_s = time.monotonic()
        if now_s - self._listed_at_s < LOOK_S:
            return
        self._listed_at_s = now_s
        folders = [folder for folder in run_folders(self._root) if _is_utf8(folder)]
        self._rows = {folder: self._followed(folder) for folder in folders}
        self._listed = []
        for followed in self._rows.values():
            try:
                self._listed.append(followed.look(now_s))
            except (UserError, OSError):  # it is being made, or removed
                continue

    def _followed(self, folder: Path) -> FollowedStatus:
        return self._rows.get(folder) or FollowedStatus(folder, self._root)

    def _version_of(self, keys: Sequence[str]) -> str:
        return _digest([self._stamp(self._folder(key)) for key in keys])

    def _stamp(self, folder: Path) -> tuple[list[FileStamp], str]:
        files = [FileStamp.of(folder / name) for name in (EVENTS, RUN_FILE, LOSSES)]
        return files, self._state(folder)

    def _state(self, folder: Path) -> str:
        followed = self._rows.setdefault(folder, self._followed(folder))
        try:
            return followed.look(time.monotonic()).status.state
        except OSError as error:
            raise UserError(Fault("run", "cannot be read", got=folder.name)) from error

    def _record(self, folder: Path) -> RunRecord:
        history = self._open.get(folder) or FollowedHistory(folder)
        self._open[folder] = history
        _drop_oldest(self._open, folder, most=MOST_OPEN)
        return history.look(state=self._state(folder))


def _is_run(folder: Path) -> bool:
    return all(is_regular_within(folder / name, folder) for name in (RUN_FILE, EVENTS))


def _is_utf8(folder: Path) -> bool:
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        return False
    return True


def _query(keys: Sequence[str]) -> str:
    return urlencode([("run", key) for key in keys])


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _drop_oldest(kept: OrderedDict[Key, Any], newest: Key, *, most: int) -> None:
    kept.move_to_end(newest)
    while len(kept) > most:
        kept.popitem(last=False)
