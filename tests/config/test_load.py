"""Owns the tests of the way from TOML and flags to a Run: layers, families, round trip, faults told all at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config import toml
from weft.config.keys import flatten, nest
from weft.config.load import load, try_load
from weft.errors import ConfigError
from weft.models import FAMILIES


def read(*words):
    return load(words, FAMILIES)


def complaints(*words):
    return [str(fault) for fault in try_load(words, FAMILIES).faults]


def config_file(folder, text, name="run.toml"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_without_words_the_run_is_a_small_llama_on_the_standard_library():
    run = read()
    assert (run.model.name, run.model.preset, run.data.source, run.device_mesh.size) == (
        "llama3",
        "llama3-tiny",
        "stdlib",
        1,
    )
    assert run.model.architecture == FAMILIES["llama3"].PRESETS["llama3-tiny"].model_dump()


def test_what_comes_later_wins(tmp_path):
    file = config_file(tmp_path, 'mesh = "dp2"\nsteps = 7\n[optim]\nlr = 0.5\nclip = 2\n')
    run = read(file, "--optim.lr", "0.25", "--steps", "8", "--steps", "9")
    assert (run.mesh, run.steps, run.optim.lr, run.optim.clip) == ("dp2", 9, 0.25, 2.0)


@pytest.mark.parametrize(
    "words",
    [
        ("--batch.global_size", "8", "--optim.betas", "0.5", "0.75", "--parallel.sequence", "True"),
        ("--batch.global-size=8", "--optim.betas", "0.5", "0.75", "--parallel.sequence=True"),
    ],
)
def test_flags_take_words_equals_signs_and_hyphens(words):
    run = read(*words)
    assert (run.batch.global_size, run.optim.betas, run.parallel.sequence) == (8, (0.5, 0.75), True)


def test_the_mesh_needs_no_quotes_and_none_unsets():
    run = read("--mesh", "pp2", "dp2", "--nproc", "4", "--nproc", "None")
    assert (run.mesh, run.nproc) == ("pp2 dp2", None)


def test_the_config_file_may_stand_after_the_flags(tmp_path):
    assert read("--seed", "5", config_file(tmp_path, "steps = 3")).steps == 3


def test_sequences_of_any_length_are_words_or_none():
    assert read("--pipeline.split", "1", "3").pipeline.split == (1, 3)
    assert read("--pipeline.split", "1", "3", "--pipeline.split").pipeline.split == ()


@pytest.mark.parametrize("preset", [name for family in FAMILIES.values() for name in family.PRESETS])
def test_every_preset_is_a_model_table_that_explicit_fields_override(preset):
    run = read("--model.preset", preset, "--model.layers", "3")
    family = FAMILIES[run.model.name]
    assert run.model.preset == preset
    assert run.model.architecture == {**family.PRESETS[preset].model_dump(), "layers": 3}
    assert isinstance(run.model, family.Config)


def test_images_are_read_from_the_digits_unless_said_otherwise():
    assert read("--model.name", "mnist").data.source == "digits"
    assert read("--model.name", "mnist", "--data.source", "here").data.source == "here"


def test_a_schedule_brings_its_own_number_of_chunks():
    assert read("--pipeline.schedule", "interleaved").pipeline.chunks == 2
    assert read("--pipeline.schedule", "interleaved", "--pipeline.chunks", "3").pipeline.chunks == 3


def test_another_model_on_the_command_line_sets_aside_the_files_fields(tmp_path):
    file = config_file(tmp_path, '[model]\npreset = "llama3-8b"\nlayers = 3\n')
    assert read(file).model.layers == 3
    assert read(file, "--model.preset", "llama3-tiny").model.layers == 4
    assert read(file, "--model.name", "gpt2").model.preset == "gpt2-tiny"


def test_a_preset_on_the_command_line_keeps_fields_of_a_file_that_names_none(tmp_path):
    file = config_file(tmp_path, '[model]\nname = "gpt2"\nlayers = 3\n')
    assert read(file, "--model.preset", "gpt2-124m").model.layers == 3


def test_equal_words_give_equal_runs_of_one_type():
    assert read("--model.name", "gpt2") == read("--model.preset", "gpt2-tiny")
    assert type(read()) is type(read())


floats = st.floats(min_value=1e-300, max_value=0.999, exclude_max=True)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
settings_of_a_run = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "out": texts,
        "nproc": st.integers(1, 99),
        "mesh": st.sampled_from(["", "dp2", "tp2 pp2"]),
        "model.preset": st.sampled_from([name for family in FAMILIES.values() for name in family.PRESETS]),
        "model.layers": st.integers(1, 200),
        "data.source": texts,
        "optim.lr": st.floats(min_value=5e-324, max_value=1.7e308),
        "optim.betas": st.tuples(floats, floats),
        "parallel.sequence": st.booleans(),
        "pipeline.schedule": st.sampled_from(["gpipe", "1f1b", "interleaved"]),
        "pipeline.split": st.lists(st.integers(1, 99), max_size=4).map(tuple),
    },
)


@settings(max_examples=100)
@given(asked=settings_of_a_run)
def test_a_run_written_as_toml_reads_back_equal(tmp_path_factory, asked):
    folder = tmp_path_factory.mktemp("toml")
    lines = [f"{key} = {toml.value(value)}" for key, value in asked.items()]
    run = read(config_file(folder, "\n".join(lines)))
    again = read(config_file(folder, toml.dump(run)))
    assert again == run
    assert toml.dump(again) == toml.dump(run)


@given(st.dictionaries(st.sampled_from(["a", "b.c", "b.d", "e.f.g"]), st.integers()))
def test_flatten_undoes_nest(flat):
    assert flatten(nest(flat)) == flat


def test_all_faults_of_file_and_flags_are_told_in_one_answer(tmp_path):
    file = config_file(
        tmp_path, 'steps = "many"\nlerning = 1\n[optim]\nlr = -1\nbetas = [0.9]\n[batch]\nglobal_size = true'
    )
    told = "\n".join(
        complaints(file, "--mesh", "dp2 dp2 q", "--modle.layers", "3", "--seed", "x", "--optim.name", "sdg")
    )
    for line in (
        "steps: wrong type (got 'many'; need a whole number, at least 1). Fix: for example --steps 200",
        "lerning: unknown key",
        "optim.lr: out of range (got -1; need a number, above 0)",
        "optim.betas: wrong type (got (0.9,); need 2 values",
        "batch.global_size: wrong type (got True; need a whole number, at least 1",
        "mesh: axis 'dp' appears twice",
        "mesh: cannot read 'q'",
        "modle.layers: unknown key. Fix: did you mean 'model.layers'?",
        "seed: wrong type (got 'x'; need a whole number",
        "optim.name: unknown value (got 'sdg'; need one of adamw, sgd). Fix: did you mean 'sgd'?",
    ):
        assert line in told
    assert len(told.splitlines()) == 10


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lr", "1"], "lr: unknown key. Fix: did you mean 'optim.lr'?"),
        (["--optim.lrr", "1"], "optim.lrr: unknown key. Fix: did you mean 'optim.lr'?"),
        (["--optimizer.name", "sgd"], "optimizer.name: unknown key"),
        (["--optim", "3"], "optim: is a table, not a value. Fix: set one of its keys: optim.betas"),
        (["--parallel.sequence"], "parallel.sequence: has no value (got nothing after the flag; need True or False)"),
        (["--parallel.sequence", "yes"], "parallel.sequence: wrong type (got 'yes'; need True or False)"),
        (
            ["--optim.betas", "0.9"],
            "optim.betas: wrong type (got '0.9'; need 2 values, each a number, at least 0, below 1)",
        ),
        (["--steps", "3", "4"], "steps: wrong type (got '3 4'; need a whole number, at least 1)"),
        (["--steps", "1.5"], "steps: wrong type (got '1.5'; need a whole number, at least 1)"),
        (["--optim.lr", "nan"], "optim.lr: out of range (got nan; need a number, above 0)"),
        (["--parallel.zero", "4"], "parallel.zero: unknown value (got '4'; need one of 0, 1, 2, 3)"),
        (["--model.name", "lama3"], "model.name: unknown model (got 'lama3'). Fix: did you mean 'llama3'?"),
        (
            ["--model.preset", "llama3-8"],
            "model.preset: unknown preset (got 'llama3-8'). Fix: did you mean 'llama3-8b'?",
        ),
        (["--model.name", "gpt2", "--model.preset", "llama3-8b"], "model.preset: is a preset of 'llama3'"),
        (
            ["--model.heads", "3"],
            "model.heads: dim 128 does not divide by heads 3. Fix: try dim 126 or 129, or heads 2, 4",
        ),
        (["a.toml", "b.toml"], "config: more than one config file (got a.toml b.toml)"),
        (["nowhere.toml"], "config: no such file (got 'nowhere.toml'; need a TOML file)"),
    ],
)
def test_a_fault_is_one_line_with_key_value_need_and_fix(words, line):
    (told,) = complaints(*words)
    assert told.startswith(line)
    assert "\n" not in told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps = \n", "(got Invalid value (at line 1, column 9))"),
        ('mesh = "dp2"\nseed == 3\n', "line 2, column 7"),
        ("a = 1\na = 2\n", "Cannot overwrite a value (at line 2, column 6)"),
    ],
)
def test_a_toml_fault_names_file_line_and_column(tmp_path, text, line):
    (told,) = complaints(config_file(tmp_path, text))
    assert told.startswith(f"config: {tmp_path}/run.toml is no TOML")
    assert line in told


def test_files_that_are_no_text_are_told(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"a = '\xff'")
    assert "no UTF-8 text at byte 5" in complaints(str(tmp_path / "run.toml"))[0]
    assert "cannot read the file" in complaints(str(tmp_path))[0]


def test_a_wrong_model_does_not_hide_other_faults_or_invent_any():
    assert len(complaints("--model.name", "lama", "--model.heads", "3", "--seed", "-1")) == 2


def test_load_raises_every_fault():
    with pytest.raises(ConfigError) as raised:
        read("--seed", "-1", "--steps", "0")
    assert len(raised.value.faults) == 2


def test_the_core_and_the_data_never_import_torch():
    code = (
        "import pkgutil, importlib, sys, weft.core, weft.data.dataset, weft.train.preflight, weft.cli, weft.models\n"
        "for module in pkgutil.walk_packages(weft.core.__path__, 'weft.core.'): importlib.import_module(module.name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
