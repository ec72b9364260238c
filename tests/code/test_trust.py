"""Code that only a stored file names: nothing of it runs before its digest is known, whatever lies beside it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import marshal
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.input.folders import forge_manifest, write_base
from weft.cli import main
from weft.code.trust import FOLDER, VARIABLE, digest_before_import, is_trusted, trust
from weft.config.user_code import load_module, trust_named
from weft.errors import EXIT_USER, ConfigError
from weft.small_files import user_folder

MARK = 'open({ran!r}, "w").close()\n'
MODEL = "import beside\ndef blocks(config): return {}\nAXES = {}\n"


@pytest.fixture(autouse=True)
def _own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A list of trusted code for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, hooks = list(sys.path), list(sys.path_hooks)
    yield
    sys.path[:], sys.path_hooks[:] = path, hooks
    sys.modules.pop("beside", None)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run folder whose model and whose checkpoint's model are a file that leaves a mark."""
    folder = tmp_path / "run"
    folder.mkdir()
    mark = MARK.format(ran=str(tmp_path / "ran"))
    (folder / "evil.py").write_text(f"{mark}{MODEL}class Rule: pass\n")
    (folder / "beside.py").write_text("")
    (folder / "run.toml").write_text(f'steps = 3\n[model]\nname = "{folder}/evil.py"\n')
    step = {"event": "step", "step": 1, "loss": 1.0, "grad_norm": 1.0, "tokens": 9, "step_s": 1.0}
    events = ({"event": "run", "start_step": 0}, step)
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
    (folder / "plan.json").write_text("{}")
    return folder


COMMANDS = (
    "explain {run}/run.toml",
    "train {run}/run.toml --resume auto",
    "simulate {run}/run.toml",
    "generate {run}",
    "eval {run}",
    "export {run} {run}/out",
    "prove {run}",
    "replay {run}",
    "launch slurm {run}/run.toml --dry-run",
    "train {run}/run.toml --help",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_that_only_a_stored_config_names(
    hostile: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(command.format(run=hostile).split())
    assert not (hostile.parent / "ran").exists()
    if "--help" not in command:
        assert code == EXIT_USER
        assert "--trust_code" in capsys.readouterr().err


def test_status_needs_no_trust(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(hostile)]) == 0
    assert "9 tokens/s" in capsys.readouterr().out
    assert not (hostile.parent / "ran").exists()


def test_an_optimizer_of_a_stored_config_does_not_run(hostile: Path) -> None:
    (hostile / "run.toml").write_text(f'[optim]\nname = "{hostile}/evil.py:Rule"\n')
    assert main(["explain", f"{hostile}/run.toml"]) == EXIT_USER
    assert main(["train", f"{hostile}/run.toml"]) == EXIT_USER
    assert not (hostile.parent / "ran").exists()


def test_a_module_of_the_working_folder_does_not_run(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = hostile / "evil_package"
    package.mkdir()
    (package / "__init__.py").write_text(MARK.format(ran=str(hostile.parent / "ran")))
    (package / "model.py").write_text(MODEL)
    (hostile / "run.toml").write_text('[model]\nname = "evil_package.model"\n')
    monkeypatch.chdir(hostile)
    assert main(["explain", "run.toml"]) == EXIT_USER
    assert not (hostile.parent / "ran").exists()


def test_the_flag_runs_it_and_puts_it_on_the_list(
    hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{hostile}/run.toml", "--trust_code"]) == EXIT_USER
    assert "returns no block" in capsys.readouterr().err  # it ran
    assert (hostile.parent / "ran").exists()
    assert VARIABLE not in os.environ
    digest = digest_before_import(f"{hostile}/evil.py")
    assert digest is not None
    assert is_trusted(digest, os.environ)


def test_a_resume_that_asks_for_changed_code_trusts_it(hostile: Path) -> None:
    main(["explain", f"{hostile}/run.toml", "--resume_code", "any"])
    assert (hostile.parent / "ran").exists()


def test_a_model_that_the_user_names_is_trusted_by_later_commands(hostile: Path) -> None:
    main(["explain", f"{hostile}/evil.py"])
    digest = digest_before_import(f"{hostile}/evil.py")
    assert digest is not None
    assert is_trusted(digest, os.environ)


def _changed_file(folder: Path) -> None:
    (folder / "evil.py").write_text(f"{(folder / 'evil.py').read_text()}# changed\n")


def _changed_file_beside(folder: Path) -> None:
    (folder / "beside.py").write_text("x = 1\n")


def _extension_beside(folder: Path) -> None:
    (folder / f"beside{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF")


def _package_beside(folder: Path) -> None:
    (folder / "beside").mkdir()
    (folder / "beside" / "__init__.py").write_text("x = 1\n")


CHANGES = (_changed_file, _changed_file_beside, _extension_beside, _package_beside)


@pytest.mark.parametrize("change", CHANGES)
def test_trust_ends_where_anything_that_is_imported_changes(hostile: Path, change) -> None:
    trust_named(f"{hostile}/evil.py")
    change(hostile)
    with pytest.raises(ConfigError, match="the code has changed since you ran it"):
        load_module(f"{hostile}/evil.py", key="model.name")
    assert not (hostile.parent / "ran").exists()


def test_the_same_file_in_another_folder_is_not_trusted(hostile: Path) -> None:
    trust_named(f"{hostile}/evil.py")
    copy = hostile.rename(hostile.with_name("moved"))  # what it reads there may be another's
    with pytest.raises(ConfigError, match="--trust_code"):
        load_module(f"{copy}/evil.py", key="model.name")


@pytest.mark.parametrize("name", ["evil", "beside"])
def test_byte_code_beside_trusted_sources_is_not_run(hostile: Path, name: str) -> None:
    """Byte code that is never compared with its source runs in its place in plain Python."""
    (hostile / "evil.py").write_text(MODEL)
    source = hostile / f"{name}.py"
    trust_named(f"{hostile}/evil.py")
    code = compile(MARK.format(ran=str(hostile.parent / "ran")), str(source), "exec")
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir(exist_ok=True)
    flags = (1).to_bytes(4, "little")
    cached.write_bytes(importlib.util.MAGIC_NUMBER + flags + bytes(8) + marshal.dumps(code))
    load_module(f"{hostile}/evil.py", key="model.name")
    assert not (hostile.parent / "ran").exists()


def test_a_list_that_others_may_write_does_not_count(hostile: Path) -> None:
    trust(f"{hostile}/evil.py")
    folder = user_folder(os.environ) / FOLDER
    digest = digest_before_import(f"{hostile}/evil.py") or ""
    assert is_trusted(digest, os.environ)
    folder.chmod(0o777)
    assert not is_trusted(digest, os.environ)


def test_without_a_list_processes_that_are_started_know(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv(VARIABLE, "")
    reference = f"{hostile}/evil.py"
    trust(reference)
    code = f"from weft.config.user_code import load_module; load_module({reference!r}, key='k')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "ran").exists()


def test_a_checkpoint_names_no_code_that_runs(hostile: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    forge_manifest(lambda manifest: manifest.update(family=f"{hostile}/evil.py"))(tmp_path / "base")
    checkpoint = tmp_path / "base" / "run" / "ckpt" / "step-000003"
    for command in ("generate", "eval"):
        assert main([command, str(checkpoint)]) == EXIT_USER
    assert main(["export", str(checkpoint), str(tmp_path / "hf")]) == EXIT_USER
    assert not (tmp_path / "ran").exists()
