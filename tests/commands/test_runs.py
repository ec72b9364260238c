"""`weft runs` and `weft compare`: recorded runs side by side."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.errors import EXIT_OK, EXIT_USER
from weft.train.event_lines import to_line


def write_run(folder: Path, losses: list[float], *, status: str = "finished", **keys: Any) -> Path:
    """A run folder as a run writes it, with these losses; `status` "" leaves the end out."""
    folder.mkdir(parents=True)
    lines = [f"{key.replace('__', '.')} = {json.dumps(value)}" for key, value in keys.items()]
    (folder / "run.toml").write_text("\n".join([f"steps = {len(losses)}", *lines]) + "\n")
    events: list[dict[str, Any]] = [{"event": "run", "step": 0, "steps": len(losses)}]
    for number, loss in enumerate(losses, 1):
        step = {"event": "step", "step": number, "loss": loss, "grad_norm": 2.0, "lr": 0.1}
        events.append({**step, "tokens": 100, "tokens_per_s": 50.0 * number, "step_s": 2.0})
    if status:
        events.append({"event": "end", "status": status, "steps": len(losses), "seconds": 61.0})
    (folder / "events.jsonl").write_text("".join(map(to_line, events)))
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    root = tmp_path / "runs"
    write_run(root / "one", [3.0, 2.0, 1.5], mesh="dp2", optim__lr=0.1)
    write_run(root / "group" / "two", [3.0, 2.0, 1.0], mesh="dp2 tp2", optim__lr=0.2)
    write_run(root / "three", [3.0, float("nan")], status="failed", optim__lr=0.1)
    (root / "one" / "ckpt").mkdir()
    (root / "one" / "ckpt" / "shard").write_bytes(bytes(3 * 2**20))
    write_run(root / "one" / "ckpt" / "no-run", [1.0])
    (root / "not-a-run").mkdir()
    os.utime(root / "three" / "events.jsonl", (1, 1))
    return root


def listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["runs", *words, "--json"]) == EXIT_OK
    answer: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("content", [b"", b"\x93\xff\n" * 9])
def test_a_run_without_an_event_that_can_be_read_has_failed_and_hides_no_other(
    content: bytes, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(runs / "spoiled", [1.0]) / "events.jsonl").write_bytes(content)
    states = {run["name"]: run["state"] for run in listed([str(runs)], capsys)}
    assert len(states) == 4
    assert states["spoiled"] == "failed"
    assert main(["status", str(runs / "spoiled")]) == EXIT_OK
    assert "no event of the run is recorded" in capsys.readouterr().out


def test_states_are_the_same_words_in_every_command(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(runs / "killed", [1.0], status="")
    states = {run["name"]: run["state"] for run in listed([str(runs)], capsys)}
    assert main(["compare", str(runs / "one"), str(runs / "killed"), "--json"]) == EXIT_OK
    compared = json.loads(capsys.readouterr().out)["runs"]
    assert [run["state"] for run in compared] == [states["one"], states["killed"]]
    assert [run["state"] for run in compared] == ["done", "failed"]


def test_every_run_below_a_folder_has_a_row(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs)]) == EXIT_OK
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split() == ["run", "state", "step", "loss", "speed", "layout", "age", "size"]
    assert max(map(len, [title, *rows])) <= 80
    found = {row.split()[0]: row for row in rows}
    assert set(found) == {"one", "group/two", "three"}
    assert "done" in found["one"]
    assert "3/3" in found["one"]
    assert "1.5000" in found["one"]
    assert "3 MiB" in found["one"]
    assert "dp2 tp2" in found["group/two"]
    assert "failed" in found["three"]
    assert "one rank" in found["three"]


def test_rows_are_sorted_and_chosen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(*words: str) -> list[str]:
        return [run["name"] for run in listed([str(runs), *words], capsys)]

    assert names("--sort", "loss") == ["group/two", "one", "three"]
    assert names("--sort", "loss", "--reverse") == ["three", "one", "group/two"]
    assert names("--sort", "name") == ["group/two", "one", "three"]
    assert names()[-1] == "three"  # its last event is the oldest
    assert names("--state", "done", "--sort", "size") == ["one", "group/two"]
    assert names("--match", "*tp2*") == ["group/two"]


def test_losses_that_are_no_numbers_are_null(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (three,) = listed([str(runs), "--state", "failed"], capsys)
    assert three["loss"] is None
    assert three["step"] == 2


def test_json_has_no_numbers_that_json_lacks(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs / "one"), str(runs / "three"), "--json"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "NaN" not in shown
    assert "Infinity" not in shown
    assert json.loads(shown)["runs"][1]["loss"] is None


def test_runs_are_compared_by_keys_losses_and_figures(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs / "one"), str(runs / "group" / "two" / "run.toml")]
    assert main(["compare", *words]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "optim.lr" in shown
    assert "steps" in shown
    assert "parts at step 3; largest difference 33%" in shown
    assert main(["compare", *words, "--json"]) == EXIT_OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["different_keys"] == {"mesh": ["dp2", "dp2 tp2"], "optim.lr": [0.1, 0.2]}
    assert answer["against_the_first"] == [
        {"common_steps": 3, "parts_at": 3, "largest_share": pytest.approx(1 / 3)}
    ]
    first = answer["runs"][0]
    assert (first["steps"], first["loss"], first["trained on"]) == (3, 1.5, 300)
    assert (first["seconds"], first["speed"]) == (61.0, 125.0)
    assert main(["compare", *words, "--tolerance", "0.5"]) == EXIT_OK
    assert "the same in 3 common steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["runs", "{tmp}/none"], "error: weft runs: there is no such folder"),
        (["runs", "a", "b"], "error: weft runs: takes one folder (got a b)"),
        (["runs", "--sort", "x"], "error: sort: unknown value (got 'x'"),
        (["compare", "{tmp}"], "error: weft compare: takes several runs"),
        (["compare", "{tmp}", "{tmp}"], "error: weft compare: there is no run here"),
        (["compare", "a", "b", "--tolerance", "-1"], "error: tolerance: out of range"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(tmp=tmp_path) for word in words]) == EXIT_USER
    shown = capsys.readouterr().err
    assert shown.startswith(error)
    assert shown.count("\n") == 1


def test_damaged_events_are_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (runs / "one" / "events.jsonl").open("a") as file:
        file.write("not json\n{}\n")
    assert main(["compare", str(runs / "one"), str(runs / "three")]) == EXIT_USER
    assert "damaged line" in capsys.readouterr().err
    assert main(["runs", str(runs)]) == EXIT_OK
