"""Commands: what they list, print and return. Training itself is tested elsewhere."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import types
from datetime import datetime

import pytest

import weft.__main__
from weft.cli import all_commands, main
from weft.config.keys import keys_of
from weft.config.load import load
from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER, CommError, RankError
from weft.models import FAMILIES
from weft.schedule.catalog import SCHEDULES
from weft.start.run_folder import new_run_folder

COMMANDS = all_commands()


def test_help_lists_the_commands_that_exist(capsys):
    for words in (["--help"], ["-h"], []):
        assert main(words) == EXIT_OK
        shown = capsys.readouterr().out
        for name in COMMANDS:
            assert f"weft {name} " in shown
        assert max(map(len, shown.splitlines())) <= 80
        assert "2 invalid input" in shown
        assert shown.count("\n  weft ") == len(COMMANDS) + 2  # each once, and two to begin with


def test_output_that_is_closed_or_ascii_is_no_traceback(monkeypatch):
    drawn = io.BytesIO()
    ascii_output = io.TextIOWrapper(drawn, encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", ascii_output)
        assert main(["schedule", "1f1b", "--ranks", "2"]) == EXIT_OK
    assert rb"rank 0 \u2502" in drawn.getvalue()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(["--version"]) == EXIT_OK
        sys.stdout.close()


def test_help_of_a_narrow_terminal_ends(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "5")
    assert main(["train", "--help"]) == EXIT_OK  # it has the longest flags
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == EXIT_OK
    assert capsys.readouterr().out.startswith("weft 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert f"weft {name}" in shown


HELP_COMMANDS = (*([name] for name in COMMANDS), ["data", "prepare"], ["data", "show"])


@pytest.mark.parametrize("words", HELP_COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_prints_no_empty_default(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for empty in ("(default: )", "(default: '')", "(default: None)", "{None}|", "|None"):
        assert empty not in shown


@pytest.mark.parametrize("model", FAMILIES)
def test_the_help_of_train_shows_every_key_of_the_model_at_hand(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--model.name", model, "--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    for key, field in keys_of(type(load(["--model.name", model], FAMILIES))).items():
        assert f"--{key} " in shown
        assert field.description.split()[-1] in shown
    assert f"(default: {model})" in shown


def test_an_unknown_command_gets_the_list_and_the_nearest(capsys):
    names = ", ".join(COMMANDS)
    assert main(["frobnicate", "--help"]) == EXIT_USER
    assert capsys.readouterr().err.startswith(
        f"error: unknown command 'frobnicate' (need one of {names})"
    )
    assert main(["trian"]) == EXIT_USER
    found = capsys.readouterr().err
    assert found == "error: unknown command 'trian'. Fix: did you mean 'train'?\n"


def test_flags_without_a_command_get_the_command_line_of_train(capsys):
    assert main(["--steps", "5"]) == EXIT_USER
    assert "Fix: weft train --steps 5\n" in capsys.readouterr().err
    assert main(["foo"]) == EXIT_USER
    assert "Fix: see weft --help\n" in capsys.readouterr().err


def test_explain_counts_one_block_and_one_rank(capsys):
    assert main(["explain", "--mesh", "pp4"]) == EXIT_OK
    assert "stage 1 on pp1: layer1 (1 block, " in capsys.readouterr().out
    assert main(["explain"]) == EXIT_OK
    assert capsys.readouterr().out.startswith("mesh: 1 rank\n")


def test_explain_prints_the_plan_without_torch(capsys):
    assert main(["explain", "--mesh", "pp2 dp2 tp2"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "mesh pp2 dp2 tp2: 8 ranks" in shown
    assert "stage 1 on pp1" in shown


def test_explain_does_not_look_at_data_or_folders(capsys):
    assert main(["explain", "--data.source", "nowhere", "--out", "/dev/null/x"]) == EXIT_OK
    assert main(["explain", "--mesh", "pp9"]) == EXIT_USER


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_draws_each(name, capsys):
    assert main(["schedule", name, "--ranks", "2", "--microbatches", "4"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "rank 1 │" in shown
    assert "bubble" in shown


def test_schedule_draws_a_table_from_a_file(tmp_path, capsys):
    (tmp_path / "own.txt").write_text(
        "microbatches 1\nstage_to_rank 0 1\nrank 0: F0.0 B0.0\nrank 1: F1.0 B1.0\n"
    )
    assert (
        main(["schedule", str(tmp_path / "own.txt"), "--ranks", "2", "--microbatches", "1"])
        == EXIT_OK
    )
    assert "50.0% bubble" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["1fb1"], "no schedule or table file '1fb1'"),
        (["--rank", "2"], "error: rank: unknown key. Fix: did you mean 'ranks'?"),
        (
            ["--ranks", "two"],
            "error: ranks: wrong type (got 'two'; need a whole number, at least 1)",
        ),
        (["--ranks", "0"], "error: ranks: out of range (got 0; need a whole number, at least 1)"),
        (["interleaved", "--microbatches", "5"], "micro-batches"),
    ],
)
def test_schedule_reports_faults_in_one_line(words, line, capsys):
    assert main(["schedule", *words]) == EXIT_USER
    (reported,) = capsys.readouterr().err.splitlines()
    assert line in reported


def test_simulate_uses_the_flops_of_the_models_blocks(capsys, monkeypatch):
    """Stages of 1, 1, 1 and 9 layers: the last rank is busy nearly all the time, the others are
    not.
    """
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--mesh", "pp4", "--model.layers", "12", "--pipeline.split"]
    bubbles = {}
    for split in ("3 3 3 3", "1 1 1 9"):
        argv = ["simulate", *words, *split.split()]
        assert main(argv) == EXIT_OK
        last_line = capsys.readouterr().out.splitlines()[-1]
        bubbles[split] = float(last_line.partition("%")[0])
    assert 25 < bubbles["3 3 3 3"] < 40
    assert bubbles["1 1 1 9"] > 60


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """What `weft.start.train_run.train` is called with; it answers what the test puts into `answer`."""
    seen = types.SimpleNamespace(runs=[], answer=lambda: EXIT_OK)

    def train(run, **_):
        seen.runs.append(run)
        return seen.answer()

    monkeypatch.setitem(sys.modules, "weft.start.train_run", types.SimpleNamespace(train=train))
    monkeypatch.chdir(tmp_path)
    return seen


def test_train_gets_the_checked_run_with_a_new_folder(trained, capsys):
    assert (
        main(
            [
                "train",
                "--steps",
                "3",
                "--device",
                "cpu",
                "--mesh",
                "dp16",
                "--batch.global_size",
                "32",
            ]
        )
        == EXIT_OK
    )
    (run,) = trained.runs
    assert run.steps == 3
    assert run.out.startswith("runs/llama3-tiny-2")
    assert capsys.readouterr().err.startswith("note: 16 ranks share ")


def test_folders_of_runs_in_the_same_second_differ(trained, tmp_path):
    model = load([], FAMILIES).model
    now = datetime(2031, 1, 2, 3, 4, 5)
    first = new_run_folder(model, now)
    assert str(first) == "runs/llama3-tiny-20310102-030405"
    first.mkdir(parents=True)
    assert str(new_run_folder(model, now)) == "runs/llama3-tiny-20310102-030405-2"


def raiser(error):
    def answer():
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), EXIT_INTERRUPTED, ""),
        (CommError("rank 1 left"), EXIT_FAILED, "error: rank 1 left\n"),
        (RankError(3, "pp1 tp1", "boom"), EXIT_FAILED, "error: rank 3 (pp1 tp1): boom\n"),
        (
            RankError(3, "pp1 tp1", "data.source: bad", kind="user"),
            EXIT_USER,
            "error: rank 3 (pp1 tp1): data.source: bad\n",
        ),
    ],
)
def test_an_error_while_training_is_an_exit_code_and_one_line(trained, error, code, line, capsys):
    trained.answer = raiser(error)
    assert main(["train", "--device", "auto"]) == code
    assert capsys.readouterr().err == line


def test_an_unexpected_error_keeps_its_traceback(trained):
    trained.answer = raiser(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_a_pipe_that_is_closed_early_is_no_error():
    command = f"{sys.executable} -m weft train --help | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: weft train")
    assert done.stderr == ""


def test_ctrl_c_while_the_commands_are_imported_is_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.cli.main", interrupted)
    assert weft.__main__.main() == EXIT_INTERRUPTED


def test_the_last_collection_of_python_leaves_out_what_was_imported(monkeypatch):
    """It took 0.6 of the 0.7 s of CPU time at the end of a command that has imported torch."""
    monkeypatch.setattr("weft.cli.main", lambda: EXIT_OK)
    frozen_before = gc.get_freeze_count()
    imported = [[] for _ in range(1000)]
    assert weft.__main__.main() == EXIT_OK
    assert gc.get_freeze_count() >= frozen_before + len(imported)
