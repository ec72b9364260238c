"""Run folders that were moved or copied, and commands that start in another folder: they resume the run that is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from weft.cli import main
from weft.commands.status import run_status
from weft.config.load import load
from weft.config.run_files import absolute_paths
from weft.errors import EXIT_USER
from weft.models import FAMILIES

TINY = (
    *("--model.layers", "1", "--model.dim", "8", "--model.heads", "2", "--model.kv_heads", "1"),
    *(
        "--model.vocab",
        "256",
        "--data.seq_len",
        "8",
        "--batch.global_size",
        "2",
        "--transport",
        "threads",
    ),
)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a project with a text and a run of two steps, named by relative paths."""
    monkeypatch.setenv("WEFT_PROVE_BEFORE", "never")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to train on\n" * 60)
    words = ["train", *TINY, "--data.source", "text.txt", "--steps", "2", "--out", "runs/first"]
    assert main(words) == 0
    return tmp_path


def _steps(folder: Path) -> list[int]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "step"]


@pytest.mark.parametrize("words", ["run.toml --resume auto", ""])
def test_a_moved_run_is_resumed_where_it_is_now(
    trained: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = trained / "elsewhere"
    elsewhere.mkdir()
    (trained / "runs" / "first").rename(elsewhere / "moved")
    monkeypatch.chdir(elsewhere)
    first, *flags = (f"moved/{words}" if words else "moved").split()
    assert main(["train", first, *flags, "--steps", "3"]) == 0
    assert _steps(elsewhere / "moved") == [1, 2, 3]
    assert not (trained / "runs" / "first").exists()
    assert not (elsewhere / "runs").exists()


def test_a_copied_run_is_resumed_in_the_copy(trained: Path) -> None:
    shutil.copytree(trained / "runs" / "first", trained / "copy")
    assert main(["train", "copy", "--steps", "3"]) == 0
    assert _steps(trained / "copy") == [1, 2, 3]
    assert _steps(trained / "runs" / "first") == [1, 2]


def test_the_command_that_status_prints_works_from_another_folder(
    trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = trained / "runs" / "first"
    events = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("\n".join(events[:-1]) + "\n")  # it was killed
    monkeypatch.chdir(run)
    text = run_status(Path("."), now_s=0.0).text
    command = text.partition("resume: ")[2].split()
    assert main([*command[1:], "--steps", "3"]) == 0
    assert _steps(run) == [1, 2, 3]


def test_a_file_that_is_gone_is_named_with_its_whole_path(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "text.txt").unlink()
    assert main(["train", "runs/first", "--steps", "3"]) == EXIT_USER
    assert f"{trained}/text.txt" in capsys.readouterr().err


def test_every_kind_of_path_is_stored_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    values = {
        "data.source": "*.txt",
        "data.tokenizer": "bytes",
        "eval.source": "a.txt",
        "data.mix": ["a.txt=0.5", "stdlib=0.5"],
        "data.chat_template": "chatml",
    }
    assert absolute_paths(values) == {
        "data.source": f"{tmp_path}/*.txt",
        "eval.source": f"{tmp_path}/a.txt",
        "data.mix": (f"{tmp_path}/a.txt=0.5", "stdlib=0.5"),
    }


def test_a_folder_means_its_run_in_other_commands(trained: Path) -> None:
    assert load(["runs/first"], FAMILIES).model.layers == 1
    assert main(["explain", "runs/first"]) == 0
