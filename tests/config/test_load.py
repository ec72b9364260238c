"""Loading a run config from TOML and flags: precedence, families, round trip, all faults in one answer."""

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


def faults(*words):
    return [str(fault) for fault in try_load(words, FAMILIES).faults]


def config_file(folder, text, name="run.toml"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_the_default_run_is_a_small_llama_on_the_standard_library():
    run = read()
    assert run.model.name == "llama3"
    assert run.model.preset == "llama3-tiny"
    assert run.data.source == "stdlib"
    assert run.device_mesh.size == 1
    assert run.model.architecture == FAMILIES["llama3"].PRESETS["llama3-tiny"].model_dump()


def test_flags_override_the_file_and_later_flags_earlier_ones(tmp_path):
    file = config_file(tmp_path, 'mesh = "dp2"\nsteps = 7\n[optim]\nlr = 0.5\nclip = 2\n')
    run = read(file, "--optim.lr", "0.25", "--steps", "8", "--steps", "9")
    assert run.mesh == "dp2"
    assert run.steps == 9
    assert run.optim.lr == 0.25
    assert run.optim.clip == 2.0


@pytest.mark.parametrize(
    "words",
    [
        ("--batch.global_size", "8", "--optim.betas", "0.5", "0.75", "--parallel.sequence", "True"),
        ("--batch.global-size=8", "--optim.betas", "0.5", "0.75", "--parallel.sequence=True"),
    ],
)
def test_flags_take_words_equals_signs_and_hyphens(words):
    run = read(*words)
    assert run.batch.global_size == 8
    assert run.optim.betas == ((0.5, 0.75))
    assert run.parallel.sequence is True


def test_the_mesh_needs_no_quotes_and_none_unsets():
    run = read("--mesh", "pp2", "dp2", "--nproc", "4", "--nproc", "None")
    assert run.mesh == "pp2 dp2"
    assert run.nproc is None


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes(b'\xef\xbb\xbfmesh = "dp2"\n')
    assert load([str(file)], FAMILIES).mesh == "dp2"


def test_a_tilde_is_the_home_folder_in_out_and_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "run.toml"
    file.write_text('out = "~/runs/x"')
    run = load([str(file), "--resume", "~/runs/y"], FAMILIES)
    assert run.out == "/home/me/runs/x"
    assert run.resume == "/home/me/runs/y"


def test_text_that_the_locale_cannot_decode_is_rejected():
    """A run in such a folder failed in the middle with UnicodeEncodeError."""
    (fault,) = try_load(["--out", "runs/\udcff"], FAMILIES).faults
    assert str(fault).startswith(
        "out: is not text in the encoding of this locale (got 'runs/\\udcff'"
    )


def test_the_config_file_may_stand_after_the_flags(tmp_path):
    assert read("--seed", "5", config_file(tmp_path, "steps = 3")).steps == 3


def test_sequences_of_any_length_are_words_or_none():
    assert read("--pipeline.split", "1", "3").pipeline.split == (1, 3)
    assert read("--pipeline.split", "1", "3", "--pipeline.split").pipeline.split == ()


@pytest.mark.parametrize(
    "preset", [name for family in FAMILIES.values() for name in family.PRESETS]
)
def test_every_preset_is_a_model_table_that_explicit_fields_override(preset):
    run = read("--model.preset", preset, "--model.layers", "3")
    family = FAMILIES[run.model.name]
    assert run.model.preset == preset
    assert run.model.architecture == {**family.PRESETS[preset].model_dump(), "layers": 3}
    assert isinstance(run.model, family.Config)


def test_models_of_images_read_the_digits_by_default():
    assert read("--model.name", "mnist").data.source == "digits"
    assert read("--model.name", "mnist", "--data.source", "here").data.source == "here"


def test_a_schedule_has_its_own_default_number_of_chunks():
    assert read("--pipeline.schedule", "interleaved").pipeline.chunks == 2
    assert read("--pipeline.schedule", "interleaved", "--pipeline.chunks", "3").pipeline.chunks == 3


def test_another_model_on_the_command_line_drops_the_fields_of_the_file(tmp_path):
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
        "model.preset": st.sampled_from(
            [name for family in FAMILIES.values() for name in family.PRESETS]
        ),
        "model.layers": st.integers(3, 200),  # the first 3 of DeepSeek-V3 are dense
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
    lines = []
    for key, value in asked.items():
        lines.append(f"{key} = {toml.value(value)}")
    run = read(config_file(folder, "\n".join(lines)))
    again = read(config_file(folder, toml.dump(run)))
    assert again == run
    assert toml.dump(again) == toml.dump(run)


@given(st.dictionaries(st.sampled_from(["a", "b.c", "b.d", "e.f.g"]), st.integers()))
def test_flatten_undoes_nest(flat):
    assert flatten(nest(flat)) == flat


def test_all_faults_of_file_and_flags_are_reported_together(tmp_path):
    file = config_file(
        tmp_path,
        'steps = "many"\nlerning = 1\n[optim]\nlr = -1\nbetas = [0.9]\n[batch]\nglobal_size = true',
    )
    reported = "\n".join(
        faults(
            file, "--mesh", "dp2 dp2 q", "--modle.layers", "3", "--seed", "x", "--optim.name", "sdg"
        )
    )
    for line in (
        "steps: wrong type (got 'many'; need a whole number, at least 1, at most 1000000000000). Fix: for example --steps 200",
        "lerning: unknown key",
        "optim.lr: out of range (got -1; need a number, above 0)",
        "optim.betas: wrong type (got (0.9,); need 2 values",
        "batch.global_size: wrong type (got True; need a whole number, at least 1",
        "mesh: axis 'dp' appears twice",
        "mesh: cannot read 'q'",
        "modle.layers: unknown key. Fix: did you mean 'model.layers'?",
        "seed: wrong type (got 'x'; need a whole number",
        "optim.name: unknown optimizer (got 'sdg'; need one of adamw, sgd, lion, muon, adafactor, or "
        "package.module:Class). Fix: did you mean 'sgd'?",
    ):
        assert line in reported
    assert len(reported.splitlines()) == 10


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lr", "1"], "lr: unknown key. Fix: did you mean 'optim.lr' or 'site.lr'?"),
        (["--optim.lrr", "1"], "optim.lrr: unknown key. Fix: did you mean 'optim.lr'?"),
        (["--optimizer.name", "sgd"], "optimizer.name: unknown key"),
        (
            ["--optim", "3"],
            "optim: is a section, not a value. Fix: set one of its keys: --optim.name",
        ),
        (["--parallel.zero"], "parallel.zero: has no value (got nothing after the flag; need"),
        (
            ["--parallel.sequence", "yes"],
            "parallel.sequence: wrong type (got 'yes'; need true or false)",
        ),
        (
            ["--optim.betas", "0.9"],
            "optim.betas: wrong type (got '0.9'; need 2 values, each a number, at least 0, below 1)",
        ),
        (
            ["--steps", "3", "4"],
            "steps: wrong type (got '3 4'; need a whole number, at least 1, at most 1000000000000)",
        ),
        (
            ["--steps", "1.5"],
            "steps: wrong type (got '1.5'; need a whole number, at least 1, at most 1000000000000)",
        ),
        (["--optim.lr", "nan"], "optim.lr: out of range (got nan; need a number, above 0)"),
        (
            ["--parallel.zero", "4"],
            "parallel.zero: unknown value (got '4'; need one of 0, 1, 2, 3)",
        ),
        (
            ["--model.name", "lama3"],
            "model.name: unknown model (got 'lama3'). Fix: did you mean 'llama3'?",
        ),
        (
            ["--model.preset", "llama3-8"],
            "model.preset: unknown preset (got 'llama3-8'). Fix: did you mean llama3-8b",
        ),
        (
            ["--model.name", "gpt2", "--model.preset", "llama3-8b"],
            "model.preset: is a preset of 'llama3'",
        ),
        (
            ["--model.heads", "3"],
            "model.heads: dim 128 does not divide by heads 3. Fix: try dim 126 or 132, or heads 2, 4",
        ),
        (["a.toml", "b.toml"], "config: more than one config file (got a.toml b.toml)"),
        (["nowhere.toml"], "config: no such file (got 'nowhere.toml'; need a TOML file)"),
    ],
)
def test_a_fault_is_one_line_with_key_value_need_and_fix(words, line):
    (reported,) = faults(*words)
    assert reported.startswith(line)
    assert "\n" not in reported


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps = \n", "(got Invalid value (at line 1, column 9))"),
        ('mesh = "dp2"\nseed == 3\n', "line 2, column 7"),
        ("a = 1\na = 2\n", "Cannot overwrite a value (at line 2, column 6)"),
    ],
)
def test_a_toml_fault_names_file_line_and_column(tmp_path, text, line):
    (reported,) = faults(config_file(tmp_path, text))
    assert reported.startswith(f"config: {tmp_path}/run.toml is not TOML")
    assert line in reported


def test_files_that_are_not_text_are_reported(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"a = '\xff'")
    assert "not UTF-8 text at byte 5" in faults(str(tmp_path / "run.toml"))[0]
    (tmp_path / "empty").mkdir()
    assert "is no regular file" in faults(str(tmp_path / "empty"))[0]


def test_a_wrong_model_does_not_hide_other_faults_or_invent_any():
    assert len(faults("--model.name", "lama", "--model.heads", "3", "--seed", "-1")) == 2


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--device", "gpu"], "did you mean 'cuda'?"),
        (["--batch_size", "8"], "did you mean 'batch.global_size' or 'batch.micro_size'?"),
        (["-n", "4"], "did you mean 'nproc'?"),
        (["--steps", "3", "-n", "4"], "did you mean 'nproc'?"),
        (["--learning-rate", "0.1"], "did you mean 'optim.lr'?"),
        (["--precision.compute", "bf16"], "did you mean 'bfloat16'?"),
        (
            ["--model.from_hf", "meta-llama/Llama-3.1-8B"],
            "only local folders are read: hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B, "
            "then --model.from_hf Llama-3.1-8B",
        ),
    ],
)
def test_words_of_other_programs_get_a_suggestion(words, fix):
    (found,) = try_load(words, FAMILIES).faults
    assert found.fix == fix


def test_presets_of_the_nearest_size_are_suggested_first():
    (found,) = try_load(["--model.preset", "llama-7b"], FAMILIES).faults
    assert found.fix.startswith("did you mean llama3-8b or ")
    (found,) = try_load(["--model.preset", "llama-80b"], FAMILIES).faults
    assert found.fix.startswith("did you mean llama3-70b or ")


def test_allowed_values_are_listed_once():
    for words in (["--parallel.zero", "4"], ["--precision.compute", "int8"]):
        (found,) = try_load(words, FAMILIES).faults
        assert found.need.startswith("one of ")
        assert found.fix.startswith(f"for example {words[0]} ")


def test_a_folder_name_without_an_organisation_gets_the_download_command_too():
    (found,) = try_load(["--model.from_hf", "gpt2"], FAMILIES).faults
    assert "hf download gpt2 --local-dir gpt2" in found.fix


def test_a_name_near_several_presets_gets_all_of_them():
    for key, start in (
        ("model.preset", "did you mean "),
        ("model.name", "did you mean --model.preset "),
    ):
        (found,) = try_load([f"--{key}", "llama-7b"], FAMILIES).faults
        assert found.fix.startswith(start)
        assert "llama3-8b" in found.fix


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_booleans_of_any_case_are_read(word):
    assert read("--parallel.sequence", word).parallel.sequence is True
    assert read(f"--parallel.sequence={word}").parallel.sequence is True
    assert read("--parallel.sequence", "false").parallel.sequence is False


def test_whole_numbers_may_have_an_exponent(tmp_path):
    run = read("--steps", "1e3", "--nproc", "1e0", "--pipeline.split", "1e0", "3.0")
    assert run.steps == 1000
    assert run.nproc == 1
    assert run.pipeline.split == ((1, 3))
    file = config_file(tmp_path, "steps = 1e3\n[data]\nseq_len = 2.56e2\n")
    run = read(file)
    assert run.steps == 1000
    assert run.data.seq_len == 256
    assert isinstance(run.steps, int)
    assert read("--optim.lr", "1e-3").optim.lr == 0.001


def test_load_raises_every_fault():
    with pytest.raises(ConfigError) as raised:
        read("--seed", "-1", "--steps", "0")
    assert len(raised.value.faults) == 2


def test_core_and_data_never_import_torch():
    code = (
        "import pkgutil, importlib, sys, weft.core, weft.data.dataset, weft.start.preflight, weft.cli, weft.models\n"
        "for module in pkgutil.walk_packages(weft.core.__path__, 'weft.core.'): importlib.import_module(module.name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    returncode = subprocess.run([sys.executable, "-c", code], check=False).returncode
    assert returncode == 0


def test_a_run_of_an_earlier_format_keeps_its_last_rate(tmp_path):
    text = "[optim]\nlr = 0.0004\nmin_lr = 0.0001\n"
    written = (
        "# The whole run: every key that decides it. Repeat it with `weft train` and this file.\n"
    )
    run = read(config_file(tmp_path, written + text))
    assert run.optim.last_lr == pytest.approx(1e-4, rel=1e-12)
    again = read(config_file(tmp_path, toml.dump(run)))
    assert again.optim == run.optim


def test_a_last_rate_that_is_no_share_is_rejected_with_the_share(tmp_path):
    words = ("--optim.lr", "3e-4", "--optim.min_lr", "3e-5")
    with pytest.raises(ConfigError) as error:
        read(*words)
    assert str(error.value) == (
        "optim.min_lr: is a share of optim.lr (got 3e-05; need 0, or 0.001 to 1). "
        "Fix: --optim.min_lr 0.1, if 3e-05 is the rate that you mean"
    )
    fix = error.value.faults[0].fix.partition(",")[0].split()
    assert read("--optim.lr", "3e-4", *fix).optim.last_lr == pytest.approx(3e-5)
    with pytest.raises(ConfigError, match=r"optim.min_lr: is a share"):
        read(config_file(tmp_path, "[optim]\nmin_lr = 0.0003\n"))


def test_another_spelling_of_a_key_is_read_everywhere(tmp_path):
    """`sample` is a number, so `sample.every` cannot be the key of a section."""
    (tmp_path / "a.toml").write_text("sample.every = 3\n")
    assert flatten({"sample": {"every": 3}}) == {"sample_every": 3}
    for words in (("--sample.every", "3"), (str(tmp_path / "a.toml"),)):
        run = load(words, FAMILIES)
        assert (run.sample, run.sample_every) == (0, 3)
