"""`weft train --profile` and `weft trace`: what real ranks record, and what is said of them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.programs import WEFT, programs
from tests.tiny_run import TINY, write_text
from weft.cli import main
from weft.errors import EXIT_OK, EXIT_USER, UserError
from weft.parallel.pipeline.player import Player, StepState
from weft.profiler.critical_path import critical_path
from weft.profiler.measured_steps import MeasuredSteps
from weft.profiler.profile_folder import profile_numbers, read_profile
from weft.schedule.actions import Act
from weft.train.event_lines import read_events
from weft_plan.commands.trace import trace

ROUNDING = 1e-6
LAYOUTS = (
    "pp2 dp2",
    "dp2 --parallel.zero 3",
    "tp2 cp2",
    "pp2 --pipeline.schedule zero_bubble",
    "pp2 --pipeline.schedule interleaved --pipeline.chunks 2 --model.layers 4",
)


def train(folder: Path, *words: str, steps: int = 6) -> Path:
    """Train a tiny run; its folder."""
    source = folder / "text.txt"
    if not source.exists():
        write_text(folder)
    out = folder / "run"
    flags = ("--data.source", str(source), "--prove.before", "never", "--report", "False")
    words = (*TINY, *words, *flags, "--steps", str(steps), "--out", str(out))
    assert main(["train", *words]) == EXIT_OK
    return out


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert trace(words) == EXIT_OK
    return capsys.readouterr().out


def say_page(capsys: pytest.CaptureFixture[str], page: Path, *words: str) -> str:
    """The page that the command writes."""
    say(capsys, *words, "--html", str(page))
    return page.read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_cover_the_steps_in_order_and_sum_to_what_they_took(
    layout: str, tmp_path: Path
) -> None:
    mesh, *flags = layout.split(" --")
    words = [word for flag in flags for word in f"--{flag}".split()]
    out = train(tmp_path, "--mesh", mesh, *words, "--profile", "3:6")
    profile = read_profile(out)
    steps = MeasuredSteps.of(profile)
    assert steps.numbers == (3, 4, 5)
    plan = weft.Plan.from_json((profile.folder / "plan.json").read_text())
    taken = {
        event["step"]: event["step_s"]
        for event in read_events(out / "events.jsonl")
        if event["event"] == "step"
    }
    for rank, phases in enumerate(steps.phases):
        for before, after in pairwise(phases):
            assert before.end == after.start
        row = plan.table.rows[profile.mesh.index(rank, "pp")]
        for number in steps.numbers:
            account = steps.account(rank, number)
            inside = [each for each in phases if each.step == number and each.end <= account.end]
            assert sum(each.end - each.start for each in inside) == pytest.approx(account.length)
            assert 0 < account.busy_s <= account.length
            actions = [each for each in steps.actions[rank] if each.step == number]
            assert tuple(each.act for each in actions) == row
            for before_act, after_act in pairwise(actions):
                assert before_act.end <= after_act.start + ROUNDING
        assert all(
            call.start <= call.started <= call.wait <= call.waited
            for call in profile.ranks[rank].calls
        )
    ends = {each.step: each.start for each in steps.phases[0] if each.name == "end"}
    for number in (4, 5):  # from one event to the next
        assert ends[number] - ends[number - 1] == pytest.approx(taken[number], rel=0.1, abs=0.02)
    for number in steps.numbers:
        path = critical_path(steps, number)
        first = steps.account(path.pieces[0].rank, number)
        assert path.pieces[0].start == pytest.approx(first.start)
        assert sum(piece.duration for piece in path.pieces) == pytest.approx(path.length)
        assert path.length <= steps.step_s(number) + ROUNDING
    text = (out / "events.jsonl").read_text()
    assert "3 steps from step 3 recorded" in text


def test_members_of_a_group_have_equal_calls(tmp_path: Path) -> None:
    out = train(tmp_path, "--mesh", "pp2 dp2", "--profile", "2:4")
    groups: defaultdict[tuple[Any, ...], dict[int, list[Any]]] = defaultdict(dict)
    for records in read_profile(out).ranks:
        for call in records.calls:
            key = (call.is_p2p, call.ranks, call.communicator)
            groups[key].setdefault(records.header.rank, []).append(call)
    assert {key[0] for key in groups} == {True, False}
    for (_, ranks, _), by_rank in groups.items():
        assert set(by_rank) == set(ranks)
        assert len({len(calls) for calls in by_rank.values()}) == 1
        assert len({tuple(call.num_bytes for call in calls) for calls in by_rank.values()}) == 1


def test_a_slow_rank_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_action = Player._run_action

    def run_slowly(player: Player, state: StepState, act: Act) -> None:
        if player.model.comm.rank == 3:
            time.sleep(0.05)
        run_action(player, state, act)

    monkeypatch.setattr(Player, "_run_action", run_slowly)
    out = train(tmp_path, "--mesh", "pp2 dp2", "--profile", "3:6")
    text = say(capsys, str(out), "--html", str(tmp_path / "x.html"))
    slow = next(line for line in text.splitlines() if line.startswith("slow: "))
    assert slow.startswith("slow: rank 3 (pp1 dp1) takes ")
    answer = json.loads(say(capsys, str(out), "--json"))
    found = answer["slow_ranks"]["ranks"][0]
    assert found["rank"] == 3
    assert found["path_share"] > 0.5
    assert found["waited_s"] > 0.02
    assert {path["step"] for path in answer["critical_paths"]} == {3, 4, 5}
    page = (tmp_path / "x.html").read_text()
    assert "slow: rank 3 (pp1 dp1)" in page
    assert not re.search(r"(src|href)\s*=|https?://|@import|@[A-Z]+@", page)


def test_the_losses_of_one_device_stand_below_the_lanes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = train(tmp_path, "--mesh", "pp2 dp2", "--profile", "2:4")
    page = tmp_path / "x.html"
    assert "data-chart" not in say_page(capsys, page, str(out))
    text = say(capsys, str(out), "--one-device", "4", "--html", str(page))
    assert "step   4  loss " in text
    assert "the losses of 4 steps are equal to those of one device" in text.replace("\n  ", " ")
    drawn = page.read_text()
    assert drawn.count("<figure data-chart") == 2
    assert all(name in drawn for name in ("Loss beside one device", '<th scope="row">4</th>'))
    scripts = re.findall(r"<script>(.*?)</script>", drawn, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts]
    assert re.findall(r"'sha256-(.*?)'", drawn) == [digest.decode() for digest in digests]
    assert not re.search(r"(src|href)\s*=|@import|@[A-Z]+@", drawn)
    assert main(["prove", str(out), "--first", "6"]) == EXIT_OK
    losses = json.loads(say(capsys, str(out), "--json"))["losses"]
    recorded = [event["loss"] for event in read_events(out / "events.jsonl") if "lr" in event]
    assert [each["recorded"] for each in losses] == recorded
    assert all(each["relative"] <= each["bound"] < 1e-3 for each in losses)


def test_the_trace_for_perfetto_nests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = train(tmp_path, "--mesh", "pp2 dp2", "--profile", "3:6")
    file = tmp_path / "x.json"
    say(capsys, str(out), "--perfetto", str(file), "--svg", str(tmp_path / "x.svg"))
    events = json.loads(file.read_text())["traceEvents"]
    threads: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            threads[event["pid"], event["tid"]].append(event)
    for spans in threads.values():
        open_until: list[float] = []
        for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
            end = span["ts"] + span["dur"]
            while open_until and open_until[-1] <= span["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, span
            open_until.append(end)
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"step 3", "step 5", "F0.0", "B1.1", "layer1, micro-batch 0", "update"} <= names
    assert any(name.startswith("all_reduce dp, ") for name in names)
    assert "F0.1 to rank 2" in names
    processes = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert processes == {
        *("predicted pp0", "predicted pp1"),
        *(f"rank {rank} (pp{rank // 2} dp{rank % 2})" for rank in range(4)),
    }
    arrows = [event for event in events if event["ph"] in "sf"]
    assert len(arrows) == 2 * len({event["id"] for event in arrows})
    assert len(arrows) >= 2 * 3 * 2 * 2 * 2  # steps x micro-batches x replicas x directions


def test_starts_do_not_mix_and_keep_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = train(tmp_path, "--mesh", "dp2", "--profile", "2:4", steps=4)
    first = {path.name: path.read_bytes() for path in (out / "profile" / "1").iterdir()}
    train(tmp_path, "--mesh", "pp2", "--profile", "6:8", "--resume", "auto", steps=8)
    train(tmp_path, "--mesh", "pp2", "--resume", "auto", steps=9)
    assert profile_numbers(out) == [1, 2]
    assert {path.name: path.read_bytes() for path in (out / "profile" / "1").iterdir()} == first
    assert [rank.header.mesh for rank in read_profile(out, 1).ranks] == ["dp2", "dp2"]
    assert "steps 6 to 7" in say(capsys, str(out))
    assert "steps 2 to 3" in say(capsys, str(out), "--number", "1")
    train(tmp_path, "--mesh", "pp2", "--profile", "2:4", "--resume", "auto", steps=10)
    assert profile_numbers(out) == [1, 2]
    assert "profile: steps 2:4 are done: this run begins after step 9" in capsys.readouterr().out


def test_a_profile_that_ends_with_the_run_is_whole(tmp_path: Path) -> None:
    out = train(tmp_path, "--profile", "5:7")
    assert MeasuredSteps.of(read_profile(out)).numbers == (5, 6)


def test_a_profile_does_not_change_the_numbers(tmp_path: Path) -> None:
    losses = []
    for words in (("--profile", "2:6"), ()):
        folder = tmp_path / str(len(losses))
        folder.mkdir()
        out = train(folder, "--mesh", "pp2 dp2", *words)
        events = read_events(out / "events.jsonl")
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert losses[0] == losses[1]


def test_a_profiler_of_torch_sees_named_ranges(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = {
        "data": {"source": str(tmp_path / "text.txt"), "seq_len": 8},
        "model": {"layers": 2, "dim": 16, "heads": 2, "kv_heads": 2, "ffn": 32},
        "batch": {"global_size": 2, "micro_size": 1},
        "prove": {"before": "never"},
        "steps": 4,
        "profile": "2:4",
        "out": str(tmp_path / "run"),
    }
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=all_threads) as profiler:
        weft.train(config)
    counts = {each.key: each.count for each in profiler.key_averages()}
    ranges = {name: count for name, count in counts.items() if name.startswith("weft: ")}
    assert ranges["weft: F0.1: forward, stage 0, micro-batch 1"] == 2
    assert ranges["weft: layer1"] == 4
    assert ranges["weft: step 3 update"] == 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--step", "9"), "error: step: was not recorded"),
        (("--number", "7"), "error: number: there is no such profile"),
        (("--svg", "/no/such/x.svg"), "error: svg: "),
        (("--hardware", "h999"), "error: hardware: "),
        (("other",), "error: weft trace: takes one run folder"),
    ],
)
def test_what_cannot_be_traced_is_one_line(
    words: tuple[str, ...],
    what: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = train(tmp_path, "--profile", "2:4", steps=4)
    monkeypatch.setattr("weft.cli.installed_command", lambda name: traced)
    traced = weft_trace()
    capsys.readouterr()
    assert main(["trace", str(out), *words]) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(what)


def weft_trace() -> Any:
    from weft_plan.entries import TRACE

    return TRACE


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two pipeline ranks, profiled."""
    return train(tmp_path_factory.mktemp("recorded"), "--mesh", "pp2", "--profile", "2:4", steps=4)


VALUES = (0, -1, 10**18, 1.5, "", "x", "F9.9", "</script>", None, True, [], {}, [9], float("nan"))


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_record_makes_it_fail_in_another_way(
    recorded: Path, data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded / "profile" / "1"
    path = folder / data.draw(
        st.sampled_from(["rank-00000.jsonl", "rank-00001.jsonl", "plan.json"])
    )
    text = path.read_text()
    lines = text.splitlines()
    place = data.draw(st.integers(0, len(lines) - 1))
    try:
        line: Any = json.loads(lines[place])
        if not isinstance(line, list | dict):
            raise ValueError("a line of an indented file")
        key = data.draw(st.sampled_from(list(line) if isinstance(line, dict) else range(len(line))))
        line[key] = data.draw(st.sampled_from(VALUES))
        lines[place] = json.dumps(line)
    except ValueError:
        del lines[place]
    try:
        path.write_text("\n".join(lines) + "\n")
        assert trace_code(str(recorded), "--html", str(recorded / "x.html")) in (EXIT_OK, EXIT_USER)
    finally:
        path.write_text(text)
    assert "Traceback" not in capsys.readouterr().err


def trace_code(*words: str) -> int:
    """The exit code, as the program has it."""
    try:
        return trace(words)
    except UserError:
        return EXIT_USER


def test_the_prediction_is_that_of_a_device_where_one_is_named(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = json.loads(say(capsys, str(recorded), "--json"))["predicted"]
    assert alone["exposed_s"] is None
    answer = json.loads(say(capsys, str(recorded), "--json", "--hardware", "h100"))
    assert answer["predicted"]["exposed_s"] is not None
    assert "H100" in answer["predicted"]["source"]
    names = {each["name"] for each in answer["differences"]}
    assert names == {"F0", "B0", "F1", "B1", "reduce", "update"}
    lanes = {span[5] for span in answer["predicted"]["timeline"]["spans"]}
    assert "pp to 1" in lanes


def test_ranks_as_processes_write_their_records(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ("--transport", "process", "--steps", "4", "--profile", "2:4", "--out", str(out))
    source = ("--data.source", str(write_text(tmp_path)), "--prove.before", "never")
    done = programs().run(WEFT, "train", "--mesh", "pp2", *TINY, *source, *flags)
    assert done.returncode == 0, done.stderr
    profile = read_profile(out)
    assert MeasuredSteps.of(profile).numbers == (2, 3)
    assert profile.clock_error_s == 0
    headers = [rank.header for rank in profile.ranks]
    assert [header.rank for header in headers] == [0, 1]
    assert abs(headers[0].origin_s - headers[1].origin_s) < 60  # one clock
