"""The event log of a run folder: complete lines after any fault, full precision, valid JSON, rejected folders."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import programs
from weft.errors import LaunchError, WeftError
from weft.train import event_log
from weft.train.event_lines import read_events, to_line
from weft.train.event_log import EVENTS, EventLog, create_run_folder

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text().filter(lambda text: "N" not in text)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


class Listener:
    def __init__(self) -> None:
        self.heard: list[dict] = []
        self.num_closed = 0

    def handle(self, event) -> None:
        self.heard.append(event)

    def close(self) -> None:
        self.num_closed += 1


def same(a, b) -> bool:
    """Equal, where a number that is none equals itself."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return False
        return all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(st.dictionaries(st.text(), VALUES))
def test_an_event_is_one_line_of_strict_json_and_reads_back_the_same(tmp_path_factory, event):
    line = to_line(event)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert "\r" not in line
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    path = tmp_path_factory.mktemp("events") / EVENTS
    path.write_text(line, encoding="utf-8", newline="\n")
    (got,) = read_events(path)
    assert same(got, event)


def test_no_numbers_are_words_that_float_reads():
    event = {"loss": math.nan, "grad_norm": math.inf, "deep": [{"x": -math.inf}]}
    line = to_line(event)
    assert line == '{"loss":"NaN","grad_norm":"Infinity","deep":[{"x":"-Infinity"}]}\n'
    assert math.isnan(float(json.loads(line)["loss"]))
    assert float(json.loads(line)["grad_norm"]) == math.inf


def test_loss_keeps_full_precision(tmp_path):
    loss = 2.3456789012345678
    with EventLog(tmp_path) as journal:
        journal.emit({"event": "step", "loss": loss})
    assert (tmp_path / EVENTS).read_text() == '{"event":"step","loss":2.345678901234568}\n'
    assert next(read_events(tmp_path / EVENTS))["loss"] == loss


def test_every_line_is_on_disk_at_once_and_every_view_hears_it(tmp_path):
    views = Listener(), Listener()
    journal = EventLog(tmp_path / "new" / "run", views)
    for step in range(3):
        journal.emit({"event": "step", "step": step})
        assert [event["step"] for event in read_events(tmp_path / "new" / "run" / EVENTS)] == list(
            range(step + 1)
        )
    journal.close()
    journal.close()
    assert [event["step"] for event in views[0].heard] == [0, 1, 2]
    assert views[0].heard == views[1].heard


def test_without_a_folder_only_the_views_hear():
    view = Listener()
    with EventLog(None, [view]) as journal:
        journal.emit({"event": "note", "text": "x"})
        journal.write("run.toml", "steps = 1\n")
    assert len(view.heard) == 1
    assert view.num_closed == 1


def test_a_last_line_cut_short_is_left_out_and_overwritten_on_resume(tmp_path):
    path = tmp_path / EVENTS
    path.write_bytes(b'{"event":"step","step":0}\n{"event":"step","st')
    assert [event["step"] for event in read_events(path)] == [0]
    with EventLog(tmp_path) as journal:
        journal.emit({"event": "step", "step": 1})
    assert path.read_bytes() == b'{"event":"step","step":0}\n{"event":"step","step":1}\n'


@pytest.mark.parametrize("torn", ["x" * 200_000, '{"event":"st', ""])
def test_whole_lines_survive_however_long_the_torn_one_is(tmp_path, torn):
    whole = '{"step":0}\n' * 20_000
    (tmp_path / EVENTS).write_text(whole + torn)
    EventLog(tmp_path).close()
    assert (tmp_path / EVENTS).read_text() == whole


def test_damage_before_the_last_line_is_an_error_that_says_where(tmp_path):
    (tmp_path / EVENTS).write_text('{"step":0}\n{"st\n{"step":2}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl:2: damaged line"):
        list(read_events(tmp_path / EVENTS))


def test_a_killed_writer_leaves_whole_lines_and_at_most_a_part_of_one_that_is_never_read(tmp_path):
    script = f"""
from pathlib import Path
from weft.train.event_log import EventLog
journal = EventLog(Path({str(tmp_path)!r}))
while True:
    journal.emit({{"event": "step", "text": "y" * 3000}})
"""
    path = tmp_path / EVENTS
    with programs().running(script) as writer:
        while writer.poll() is None and (not path.exists() or path.stat().st_size < 100_000):
            time.sleep(0.001)
    left = list(read_events(path))
    expected = [{"event": "step", "text": "y" * 3000}] * path.read_bytes().count(b"\n")
    assert left == expected
    with EventLog(tmp_path) as journal:
        journal.emit({"event": "end"})
    assert path.read_bytes().endswith(b"\n")
    assert list(read_events(path)) == [*left, {"event": "end"}]


def test_other_files_of_a_run_folder_are_whole_and_leave_nothing_else(tmp_path):
    with EventLog(tmp_path) as journal:
        journal.write("plan.json", "{}\n")
        journal.write("plan.json", '{"mesh":"dp2"}\n')
    assert (tmp_path / "plan.json").read_text() == '{"mesh":"dp2"}\n'
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [EVENTS, "plan.json"]


@pytest.mark.parametrize("out", ["/proc/weft", "{file}", "{file}/inside"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, out):
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(
        LaunchError,
        match=r"^out: cannot write to the run folder \(got .*\)\. Fix: choose another out$",
    ):
        create_run_folder(Path(out.format(file=file)))


def test_an_event_is_written_by_one_call(tmp_path, monkeypatch):
    calls = []
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda file, data: calls.append(bytes(data)) or write(file, data)
    )
    with EventLog(tmp_path) as journal:
        journal.emit({"event": "step", "text": "y" * 100_000})
    assert calls == [(tmp_path / EVENTS).read_bytes()]


def test_planted_symbolic_links_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep")
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / EVENTS).symlink_to(victim)
    with pytest.raises(LaunchError, match=r"events\.jsonl: a symbolic link"):
        EventLog(run_folder)
    (run_folder / EVENTS).unlink()
    (run_folder / "plan.json").symlink_to(victim)
    with EventLog(run_folder) as log:
        log.write("plan.json", "{}")
    assert (run_folder / "plan.json").read_text() == "{}"
    assert not (run_folder / "plan.json").is_symlink()
    assert victim.read_text() == "keep"


def test_a_fifo_as_event_log_is_rejected(tmp_path):
    os.mkfifo(tmp_path / EVENTS)
    with pytest.raises(LaunchError, match="not a regular file"):
        EventLog(tmp_path)


def test_files_of_a_run_that_starts_again_on_a_full_disk_stay(tmp_path, monkeypatch):
    def fail(path: Path, text: str, *, kept: Path | None = None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with EventLog(tmp_path) as log:
        log.write_versioned("run.toml", "steps = 1\n")
        monkeypatch.setattr(event_log, "replace_file", fail)
        log.write_versioned("run.toml", "steps = 1\n")
        with pytest.raises(WeftError, match=r"plan.json.*No space left on device"):
            log.write_versioned("plan.json", "{}")
    assert (tmp_path / "run.toml").read_text() == "steps = 1\n"


KILLED = 9
CHANGES = ("open", "os.rename", "os.link", "os.remove")


def run_until_change(folder: Path, number: int) -> bool:
    """Replace run.toml in a process that is killed just before its n-th change of a file; whether
    it was killed.
    """
    child = os.fork()
    if child == 0:
        try:
            _replace_until_change(folder, number)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == KILLED


def _replace_until_change(folder: Path, number: int) -> None:
    seen = 0

    def count(event: str, _arguments: tuple[object, ...]) -> None:
        nonlocal seen
        seen += event in CHANGES
        if seen == number:
            os._exit(KILLED)  # as a kill: nothing is cleaned up

    log = EventLog(folder)
    sys.addaudithook(count)
    log.write_versioned("run.toml", "steps = 2\n")
    os._exit(0)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_run_killed_while_it_replaces_its_config_has_a_whole_one(
    tmp_path, monkeypatch, has_links
):
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    for number in range(1, 20):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "run.toml").write_text("steps = 1\n")
        was_killed = run_until_change(folder, number)
        texts = {path.name: path.read_text() for path in folder.glob("run*.toml")}
        old = [name for name, text in texts.items() if text == "steps = 1\n"]
        assert old, "the old config is there under one of its names"
        if has_links:
            assert texts["run.toml"] in ("steps = 1\n", "steps = 2\n")
        EventLog(folder).write_versioned("run.toml", "steps = 2\n")
        again = {path.name: path.read_text() for path in folder.glob("run*.toml")}
        assert again == {"run.toml": "steps = 2\n", "run-1.toml": "steps = 1\n"}
        if not was_killed:
            break
    assert 3 < number < 19, "some changes of files, all of them tried"
