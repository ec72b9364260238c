"""Config files with a base: keys under each other, models that are replaced whole, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config import toml
from weft.config.base_files import MAX_FILES, read_with_bases
from weft.config.load import load, try_load
from weft.errors import ConfigError
from weft.models import FAMILIES
from weft_plan.commands.searched_run import _pinned_keys


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def faults(*words: str) -> list[str]:
    return [str(fault) for fault in try_load(words, FAMILIES).faults]


def test_own_keys_override_those_of_the_base_and_flags_both(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "steps = 5\nseed = 7\n[optim]\nlr = 0.5\nwarmup = 3\n")
    file = write(tmp_path, "own.toml", 'base = "base.toml"\nsteps = 6\n[optim]\nlr = 0.25\n')
    run = load([file, "--optim.warmup", "4"], FAMILIES)
    assert (run.seed, run.steps, run.optim.lr, run.optim.warmup) == (7, 6, 0.25, 4)


def test_each_base_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, "first.toml", "seed = 3\nsteps = 1\n[batch]\nmicro_size = 1\n")
    write(tmp_path, "inner/second.toml", 'base = "../first.toml"\nsteps = 2\nmesh = "dp2"\n')
    file = write(tmp_path, "own.toml", 'base = "inner/second.toml"\nmesh = "tp2"\n')
    run = load([file], FAMILIES)
    assert (run.seed, run.steps, run.mesh, run.batch.micro_size) == (3, 2, "tp2", 1)


def test_the_run_is_that_of_one_file_with_all_keys_and_stores_no_base(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", 'mesh = "dp2"\n[model]\nlayers = 3\n')
    file = write(tmp_path, "own.toml", 'base = "base.toml"\n[model]\ndim = 64\n')
    whole = write(tmp_path, "whole.toml", 'mesh = "dp2"\n[model]\nlayers = 3\ndim = 64\n')
    run = load([file], FAMILIES)
    assert run == load([whole], FAMILIES)
    stored = write(tmp_path, "stored.toml", toml.dump(run))
    assert "base" not in toml.read(stored)
    assert load([stored], FAMILIES) == run


def test_a_file_that_chooses_another_model_replaces_the_model_of_its_base(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", 'steps = 4\n[model]\npreset = "llama3-tiny"\nkv_heads = 1\n')
    file = write(tmp_path, "own.toml", 'base = "base.toml"\n[model]\nname = "gpt2"\n')
    run = load([file], FAMILIES)
    assert (run.model.name, run.steps) == ("gpt2", 4)
    assert run.model == load(["--model.name", "gpt2"], FAMILIES).model


def test_fields_without_a_model_change_the_model_of_the_base(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", '[model]\npreset = "gpt2-124m"\nlayers = 3\n')
    file = write(tmp_path, "own.toml", 'base = "base.toml"\n[model]\ndim = 96\nheads = 4\n')
    model = load([file], FAMILIES).model
    assert (model.preset, model.layers, model.dim) == ("gpt2-124m", 3, 96)


def test_a_run_as_base_lends_its_keys_without_its_folder(tmp_path: Path) -> None:
    run = load(["--steps", "9", "--out", str(tmp_path / "run"), "--resume", "auto"], FAMILIES)
    write(tmp_path, "run/run.toml", toml.dump(run))
    (tmp_path / "run" / "events.jsonl").write_text("")
    file = write(tmp_path, "own.toml", 'base = "run/run.toml"\nseed = 2\n')
    found = load([file], FAMILIES)
    assert (found.steps, found.seed, found.out, found.resume) == (9, 2, None, None)


def test_the_search_of_layouts_keeps_what_a_base_names(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[parallel]\nzero = 1\n")
    file = write(tmp_path, "own.toml", 'base = "base.toml"\n')
    assert "parallel.zero" in _pinned_keys([file])


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"own": 'base = "own.toml"'}, "base: is a cycle (got"),
        ({"own": 'base = "b.toml"', "b": 'base = "own.toml"'}, "own.toml). Fix: remove one"),
        ({"own": 'base = "gone.toml"'}, "gone.toml'; need a TOML file). Fix: check base in"),
        ({"own": 'base = "b.toml"', "b": 'base = "gone.toml"'}, "b.toml: no such file"),
        ({"own": "base = 3"}, "own.toml is no path (got 3"),
        ({"own": 'base = ""'}, "own.toml is no path (got ''"),
        ({"own": 'base = ["b.toml"]'}, "own.toml is no path"),
        ({"own": 'base = "b.toml"', "b": "steps == 1"}, "own.toml: "),
        ({"own": 'base = "b.toml"', "b": "stepz = 1"}, "stepz: unknown key in "),
        ({"own": 'base = "b.toml"', "b": "steps = 0"}, "b.toml (got 0; need a whole number"),
        ({"own": 'base = "b.toml"\nstepz = 2', "b": "steps = 1"}, "own.toml. Fix: did you mean"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(
    tmp_path: Path, files: dict[str, str], line: str
) -> None:
    for name, text in files.items():
        write(tmp_path, f"{name}.toml", text)
    found = faults(str(tmp_path / "own.toml"))
    assert len(found) == 1
    assert line in found[0]
    assert str(tmp_path) in found[0]


def test_a_chain_has_an_end(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 1):
        write(tmp_path, f"{number}.toml", f'base = "{number + 1}.toml"\n')
    write(tmp_path, f"{MAX_FILES}.toml", "seed = 5\n")
    with pytest.raises(ConfigError, match="is too long a chain"):
        read_with_bases(str(tmp_path / "0.toml"))
    assert read_with_bases(str(tmp_path / "1.toml")) == {"seed": 5}


def test_base_is_no_flag_and_is_not_read_in_a_run_folder(tmp_path: Path) -> None:
    assert faults("--base", "x.toml") == [
        "base: is a key of config files. Fix: "
        'write base = "other.toml" into the file, or name that file in place of this flag'
    ]
    write(tmp_path, "b.toml", "seed = 5\n")
    write(tmp_path, "run/run.toml", 'base = "../b.toml"\n')
    (tmp_path / "run" / "events.jsonl").write_text("")
    (found,) = faults(str(tmp_path / "run"))
    assert "lies in a run folder" in found
