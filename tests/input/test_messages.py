"""Messages that are followed literally: what a person of another program types, and the command that the answer names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.input.folders import write_base
from weft.cli import main
from weft.config.load import load
from weft.errors import EXIT_OK, EXIT_USER
from weft.models import FAMILIES
from weft.start.checked_run import load_checked_run

SMALL = "--model.layers 1 --data.seq_len 8"
FOLLOWED = {
    "an axis of FSDP": ("explain --mesh fsdp2", "--parallel.zero 3"),
    "an axis of Megatron": ("explain --mesh sp2", "--mesh tp2 --parallel.sequence True"),
    "a model without its key": ("explain --model gpt2", "--model.preset"),
    "8 bits": (
        "explain --precision.compute fp8",
        "types of 8 bits are not implemented (got 'fp8'; need one of float64, float32, bfloat16, "
        "float16). Fix: did you mean 'bfloat16'?",
    ),
    "a YAML file": ("explain c.yaml", "write its keys as TOML, for example steps = 20"),
    "a JSON file": ("explain c.json", "write its keys as TOML, for example steps = 20"),
    "a variable in a folder": ("train --out $HOME/x", "Fix: --out /home/me/x"),
    "a variable in a path": ("explain --data.source $HOME/x", "Fix: --data.source /home/me/x"),
    "a path of Windows": (
        r"train --data.source C:\texts\a.txt",
        "such as --data.source texts/a.txt",
    ),
    "the current folder": ("data show .", "weft data prepare INPUT --out prepared"),
    "standard input": ("train --data.source /dev/stdin", "copy its content into a file"),
    "a word that is near a command": (
        "trian",
        "error: unknown command 'trian'. Fix: did you mean 'train'?",
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_answer_names_what_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "c.yaml").write_text("steps: 3\n")
    (tmp_path / "c.json").write_text('{"steps": 3}')
    command, answer = FOLLOWED[name]
    assert main(shlex.split(command.replace("\\", "\\\\"))) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert answer in line


@pytest.mark.parametrize(
    "fix", ["--mesh dp2 --parallel.zero 3", "--mesh tp2 --parallel.sequence True"]
)
def test_what_a_mesh_of_another_program_means_is_accepted(fix: str) -> None:
    assert load_checked_run(fix.split()).device_mesh.size == 2


@pytest.mark.parametrize("words", ["-v", "-V", "version", "--version"])
def test_the_version_by_every_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([words]) == EXIT_OK
    assert capsys.readouterr().out.startswith("weft ")


def test_help_of_a_command_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "doctor"]) == EXIT_OK
    assert capsys.readouterr().out.startswith("usage: weft doctor")
    assert main(["help"]) == EXIT_OK
    assert "weft train " in capsys.readouterr().out


def test_a_switch_without_a_value_is_on() -> None:
    words = ("--mesh", "dp2", "--steps", "3")
    assert load([*words, "--deterministic"], FAMILIES).deterministic
    assert load(["--parallel.sequence", *words], FAMILIES).parallel.sequence
    assert not load(["--deterministic", "False", *words], FAMILIES).deterministic


@pytest.mark.parametrize("flag", ["--json", "--json True", "--json=True"])
def test_json_is_the_same_in_every_command(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "run"}\n')
    commands = (
        f"status {tmp_path}",
        "schedule 1f1b",
        f"explain --mesh dp2 {SMALL}",
        "bench comm --transport threads --operations all_reduce --largest 1KB --seconds 1e-4",
    )
    for command in commands:
        assert main([*command.split(), *flag.split()]) == EXIT_OK
        json.loads(capsys.readouterr().out)


def test_a_plan_without_a_model_says_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--devices", "4096", "--hardware", "h100"]) == EXIT_USER
    assert "Fix: name the model that is planned: --model.preset" in capsys.readouterr().err


def test_an_import_names_a_command_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has no tokenizer, and 32 tokens: bytes would not fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_PROVE_BEFORE", "never")
    write_base(tmp_path)
    assert main(["import", "hf", "--out", "imported", "--compare", "False"]) == EXIT_OK
    *_, last = capsys.readouterr().out.splitlines()
    command = shlex.split(last.rpartition(": ")[2])
    (tmp_path / "tokens.json").write_text(TOKENIZER)
    (tmp_path / "text.txt").write_text(" ".join(["some text"] * 60))
    words = [{"FILE": "tokens.json", "TEXTS": "text.txt"}.get(word, word) for word in command[1:]]
    small = [
        "--steps",
        "1",
        "--batch.global_size",
        "2",
        "--data.seq_len",
        "8",
        "--transport",
        "threads",
    ]
    assert main([*words, *small]) == EXIT_OK


TOKENIZER = (
    '{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, '
    '"post_processor": null, "decoder": null, '
    '"model": {"type": "WordLevel", "vocab": {"some": 0, "text": 1, "?": 2}, "unk_token": "?"}}'
)


def test_generate_after_an_edit_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_base(tmp_path)
    config = tmp_path / "run" / "run.toml"
    config.write_text(config.read_text().replace("dim = 32", "dim = 48"))
    assert main(["generate", str(tmp_path / "run")]) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert "dim" in line
    assert "48" in line
    assert "32" in line
