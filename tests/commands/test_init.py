"""`weft init`: questions on a terminal, defaults and flags without one, and a file that is a run and is never overwritten."""

from __future__ import annotations

import builtins
import os
import pty
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.input.printed_commands import commands_in
from tests.tiny_run import TINY, write_text
from weft.cli import main
from weft.config.load import load
from weft.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER
from weft.models import FAMILIES

DEFAULTS = ["", "", "", ""]


@dataclass
class TypedAnswers:
    """A person at a terminal: answers in their order, then Ctrl-D; and the questions that were asked."""

    answers: list[str]
    questions: list[str] = field(default_factory=list)

    def __call__(self, prompt: str) -> str:
        self.questions.append(prompt)
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)

    @property
    def subjects(self) -> list[str]:
        """The first word of each question."""
        return [question.replace(":", " ").split()[0] for question in self.questions]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.commands.init_file.glob.glob", lambda pattern: [])
    write_text(tmp_path)
    return tmp_path


def at_terminal(monkeypatch: pytest.MonkeyPatch, *answers: str) -> TypedAnswers:
    person = TypedAnswers(list(answers))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", person)
    return person


def test_enter_takes_each_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    person = at_terminal(monkeypatch, *DEFAULTS)
    assert main(["init"]) == EXIT_OK
    assert person.subjects == ["model", "data", "devices", "steps"]
    assert [question[question.index(" [") :] for question in person.questions] == [
        " [llama3-tiny]: ",
        " [stdlib]: ",
        " [1]: ",
        " [200]: ",
    ]
    assert load(["run.toml"], FAMILIES) == load([], FAMILIES)


def test_answers_are_keys_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_terminal(monkeypatch, "gpt2-124m", "text.txt", "3", "50")
    assert main(["init", "mine.toml"]) == EXIT_OK
    run = load(["mine.toml"], FAMILIES)
    assert (run.model.preset, run.data.source, run.mesh, run.steps) == (
        *("gpt2-124m", "text.txt", "dp3"),
        50,
    )
    assert run.batch.global_size == 18, "a multiple of the data ranks"
    assert (run.optim.lr, run.data.seq_len) == (3e-4, 1024), "of models that are not tiny"


def test_a_wrong_answer_is_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    person = at_terminal(monkeypatch, "llama-8b", "", "nowhere.txt", "text.txt", "0", "2", "x", "9")
    assert main(["init"]) == EXIT_OK
    assert person.subjects == [
        *("model", "model", "data", "data"),
        *("devices", "devices", "steps", "steps"),
    ]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [
        *("model.preset", "data.source", "nproc", "steps")
    ]
    run = load(["run.toml"], FAMILIES)
    assert (run.data.source, run.mesh, run.steps) == ("text.txt", "dp2", 9)


def test_what_a_flag_says_is_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    person = at_terminal(monkeypatch, "7")
    words = ["--data.source", "text.txt", "--devices", "2", "--model.name", "gpt2"]
    assert main(["init", *words, "--optim.betas", "0.8", "0.9"]) == EXIT_OK
    assert person.subjects == ["steps"]
    keys = tomllib.loads((folder / "run.toml").read_text())
    assert keys["model"] == {"preset": "gpt2-tiny", "name": "gpt2"}
    assert keys["optim"]["betas"] == [0.8, 0.9]
    assert (keys["mesh"], keys["steps"]) == ("dp2", 7)


def test_the_end_of_the_input_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_terminal(monkeypatch, "")
    assert main(["init"]) == EXIT_INTERRUPTED
    assert not (folder / "run.toml").exists()


def test_without_a_terminal_nothing_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builtins, "input", lambda prompt: pytest.fail("a question"))
    assert main(["init", "a b.toml", "--steps", "3", "--model.preset", "mnist-mlp"]) == EXIT_OK
    run = load(["a b.toml"], FAMILIES)
    assert (run.steps, run.data.source, run.optim.lr) == (3, "digits", 3e-3)
    assert "\n  weft explain 'a b.toml'\n" in capsys.readouterr().out


def test_the_commands_of_a_file_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--steps", "2", *TINY]) == EXIT_OK
    printed = capsys.readouterr().out + (folder / "run.toml").read_text()
    found = [words for words in map(shlex.split, commands_in(printed)) if "--help" not in words]
    assert found == [
        ["explain", "run.toml"],
        ["train", "run.toml"],
        ["train", "run.toml", "--optim.lr", "1e-3"],
    ]
    for words in found:
        assert main(words) == EXIT_OK


def test_a_mesh_that_is_chosen_later_stays_auto(folder: Path) -> None:
    assert main(["init", "--mesh", "auto", "--nproc", "2"]) == EXIT_OK
    keys = tomllib.loads((folder / "run.toml").read_text())
    assert (keys["mesh"], keys["nproc"]) == ("auto", 2)


def test_every_line_has_a_comment_and_comments_are_keys(folder: Path) -> None:
    assert main(["init"]) == EXIT_OK
    lines = (folder / "run.toml").read_text().splitlines()
    keys = [line for line in lines if " = " in line]
    assert all("  # " in line for line in keys)
    uncommented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in lines)
    (folder / "all.toml").write_text(uncommented)
    run = load(["all.toml"], FAMILIES)
    assert (run.mesh, run.save.every, run.track) == ("dp2", 100, ("tensorboard",))


def test_a_file_is_never_overwritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    person = at_terminal(monkeypatch, *DEFAULTS)
    (folder / "run.toml").symlink_to("gone")
    assert main(["init"]) == EXIT_USER
    assert "weft init: overwrites no file (got 'run.toml')" in capsys.readouterr().err
    assert not person.questions
    assert not (folder / "gone").exists()


def test_a_flag_that_is_wrong_is_a_fault_and_no_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    person = at_terminal(monkeypatch, *DEFAULTS)
    assert main(["init", "--stepz", "3"]) == EXIT_USER
    assert not person.questions
    assert "stepz: unknown key" in capsys.readouterr().err


def test_a_real_terminal_is_asked(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "weft", "init"],
        stdin=end,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )
    os.write(terminal, b"\n\n1\n5\n")
    out, _ = program.communicate(timeout=60)
    os.close(terminal)
    os.close(end)
    assert program.returncode == EXIT_OK, out.decode()
    assert b"steps [200]: " in out
    assert tomllib.loads((tmp_path / "run.toml").read_text())["steps"] == 5
