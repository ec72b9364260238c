"""What a model reads while it is loaded, built and tried: in its identity by name, and in that of no other code."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.input.test_model_files import FORWARD, GOOD
from weft.checkpoint.resume import _model_changes
from weft.code.identity import CodeIdentity, changed_parts
from weft.code.reads import Reads
from weft.config.load import load
from weft.config.user_code import load_module, trust_named
from weft.errors import ConfigError
from weft.models import FAMILIES
from weft.models.code_of_run import code_of_run
from weft.start.checked_run import load_checked_run

READS = """
import json, os, pathlib, subprocess
import numpy as np
HERE = pathlib.Path(__file__).parent

def read():
    {statement}
"""
FOUND = {
    "getenv": ("os.getenv('SCALE')", "environment variable SCALE"),
    "get": ("os.environ.get('SCALE', 1)", "environment variable SCALE"),
    "in": ("'SCALE' in os.environ", "environment variable SCALE"),
    "bytes": ("os.environb.get(b'SCALE')", "environment variable SCALE"),
    "json": ("with open(HERE / 'table.json') as file: json.load(file)", "file table.json"),
    "pathlib": ("(HERE / 'table.json').read_text()", "file table.json"),
    "numpy": ("np.load(HERE / 'table.npy')", "file table.npy"),
    "import": ("import late_part", "file late_part.py"),
    "missing": ("HERE.joinpath('a').exists() or open(HERE / 'none.json')", "file none.json"),
}
UNKNOWN = {
    "listing": ("dict(os.environ)", "it lists all environment variables"),
    "process": ("subprocess.run(['true'])", "it starts a process: true"),
}


def module_with(statement: str, folder: Path):
    (folder / "table.json").write_text("[1]")
    np.save(folder / "table.npy", np.zeros(1))
    (folder / "late_part.py").write_text("VALUE = 1")
    path = folder / "reading.py"
    path.write_text(READS.format(statement=statement))
    trust_named(path)
    return load_module(str(path), key="model.name")


@pytest.mark.parametrize("kind", FOUND)
def test_a_read_is_recorded(tmp_path, monkeypatch, kind):
    statement, part = FOUND[kind]
    monkeypatch.setenv("SCALE", "1")
    monkeypatch.delitem(sys.modules, "late_part", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = module_with(statement, tmp_path)
    reads = Reads()
    with reads.recorded():
        try:
            module.read()
        except FileNotFoundError:
            assert kind == "missing"
    names = [f"environment variable {name}" for name in reads.variables]
    names += [f"file {Path(name).name}" for name in reads.files]
    assert names == [part]
    assert not reads.unknown


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_cannot_be_hashed_is_named(tmp_path, kind):
    statement, reason = UNKNOWN[kind]
    reads = Reads()
    with reads.recorded():
        module_with(statement, tmp_path).read()
    assert reason in reads.unknown


def test_reads_of_weft_and_outside_of_a_recording_do_not_count(tmp_path):
    module = module_with("os.getenv('SCALE')", tmp_path)
    module.read()
    lookup = type(os.environ).__getitem__
    reads = Reads()
    with reads.recorded():
        load([], FAMILIES)
        weft_files = [name for name in reads.files if "weft" in Path(name).parts]
    assert weft_files == []
    assert type(os.environ).__getitem__ is lookup
    assert not reads.variables


READING = (
    "import json, os, pathlib\nimport outside\n"
    "DEPTH = json.loads((pathlib.Path(__file__).parent / 'table.json').read_text())\n"
)
OUTSIDE = f"{FORWARD} * outside.FACTOR"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model that reads a file when it is imported, a variable when it is built, a module elsewhere."""
    # Byte code of a text that is replaced within a second by one of its length would be run again.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(*, file="[1]", variable="1", outside="FACTOR = 1\n", text=""):
        for name in [*sys.modules]:
            if name == "outside" or name.startswith("weft_user_reader_"):
                monkeypatch.delitem(sys.modules, name)
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other/outside.py").write_text(outside)
        (tmp_path / "table.json").write_text(file)
        monkeypatch.setenv("SCALE", variable)
        monkeypatch.syspath_prepend(str(tmp_path / "other"))
        path = tmp_path / "reader.py"
        scaled = GOOD.replace("self.calls = 0", "self.calls = float(os.environ['SCALE'])")
        path.write_text(READING + scaled.replace(FORWARD, OUTSIDE) + text)
        with FAMILIES.restored():
            section = load([str(path)], FAMILIES).model
            FAMILIES[section.name].facts(section)  # builds it
            return section, code_of_run(section.name, "adamw")

    return write


def test_the_identity_of_a_run_names_what_its_model_reads(model):
    _, first = model()
    assert first.unknown == ()
    assert {"file table.json", "environment variable SCALE", "module outside"} <= first.parts.keys()
    assert model()[1] == first
    changes = (
        (model(file="[2]")[1], "file table.json"),
        (model(variable="2")[1], "environment variable SCALE"),
        (model(outside="FACTOR = 2\n")[1], "variable FACTOR (outside)"),
        (model(text="\nclass Layer(Layer): pass\n")[1], "class Layer (reader.py)"),
    )
    for other, part in changes:
        assert other.digest != first.digest
        assert part in changed_parts(first.parts, other, folder=None)


def test_what_a_forward_reads_is_recorded_by_the_checks_of_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALE", "1")
    path = tmp_path / "scaled.py"
    path.write_text(
        "import os\n" + GOOD.replace(FORWARD, f"{FORWARD} * float(os.environ['SCALE'])")
    )
    with FAMILIES.restored():
        run = load_checked_run([str(path)])
        assert "environment variable SCALE" in code_of_run(run.model.name, "adamw").parts


def test_the_code_of_an_optimizer_counts(tmp_path):
    text = (
        "import weft\nRATE = 1\nclass Mine(weft.Optimizer):\n    def direction(self): return RATE\n"
    )
    found = []
    for number, rate in enumerate((1, 1, 2)):
        path = tmp_path / str(number) / "mine.py"
        path.parent.mkdir()
        path.write_text(text.replace("RATE = 1", f"RATE = {rate}"))
        trust_named(path)
        found.append(code_of_run("llama3", f"{path}:Mine"))
    first, same, other = found
    assert first.digest == same.digest
    assert changed_parts(first.parts, other, folder=None) == ("variable RATE (mine.py)",)
    assert code_of_run("llama3", "adamw") == CodeIdentity()


def test_a_resume_names_the_code_that_differs(model, tmp_path):
    section, first = model()
    facts = SimpleNamespace(
        run={}, family=section.name, architecture=section.architecture, code=first.parts
    )
    path = tmp_path / "run/ckpt/step-000001"
    assert not list(_model_changes(section, facts, path, first))
    section, now = model(file="[2]", variable="3", outside="FACTOR = 2\n")
    (fault,) = _model_changes(section, facts, path, now)
    text = str(fault)
    assert f"the code of the model differs from that of the checkpoint {path}: " in text
    for name in ("environment variable SCALE", "file table.json", "variable FACTOR (outside)"):
        assert name in text, text


def test_variables_are_compared_though_the_model_has_not_been_built(model, tmp_path, monkeypatch):
    _, first = model()
    static = {name: part for name, part in first.parts.items() if not name.startswith("env")}
    current = replace(first, parts=static)
    assert changed_parts(first.parts, current, folder=tmp_path) == ()
    monkeypatch.setenv("SCALE", "5")
    assert changed_parts(first.parts, current, folder=tmp_path) == ("environment variable SCALE",)


def test_another_python_or_package_is_no_other_model(model):
    _, first = model()
    other = {**first.parts, "python": "3.99", "class Layer (reader.py)": "0", "package torch": "0"}
    assert changed_parts(other, first, folder=None) == ()
    assert CodeIdentity(other).digest != first.digest


def test_a_changed_file_names_what_differs_when_its_run_is_loaded(model, tmp_path):
    section, first = model()
    run = tmp_path / "run"
    run.mkdir()
    (run / "code.json").write_text(first.to_json())
    (run / "run.toml").write_text(
        f'model = {{ name = "{section.name}", digest = "{section.digest}" }}'
    )
    model(text="\nclass Layer(Layer): pass\n")
    with (
        FAMILIES.restored(),
        pytest.raises(ConfigError, match=r"run started: class Layer \(reader.py\)"),
    ):
        load([str(run / "run.toml")], FAMILIES)


def test_a_recording_goes_on_after_an_equal_one_inside_of_it_has_ended(tmp_path, monkeypatch):
    """Loading a model that loads another one: the inner recording alone is ended."""
    monkeypatch.setenv("SCALE", "2")
    module = module_with(FOUND["getenv"][0], tmp_path)
    outer, inner = Reads(), Reads()
    with outer.recorded():
        with inner.recorded():
            pass
        module.read()
    assert list(outer.variables) == ["SCALE"]
    assert not inner.variables
