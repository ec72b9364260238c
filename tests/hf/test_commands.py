"""`weft import`, `weft export` and `--model.from_hf` from the command line: import, train, export, and error messages."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.folders import CONFIGS, Memory, config_of, edit, edit_config, random_values, write
from weft.checkpoint.folder import checkpoint_path
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.config.load import load
from weft.config.toml import read
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.hf.folder import HfFolder
from weft.models import FAMILIES
from weft.start.checked_run import load_checked_run
from weft.start.preflight import training_notes
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

LLAMA = CONFIGS["llama3"].model_copy(update={"vocab": 256})
TRAIN = (
    *("--mesh", "pp2 tp2", "--transport", "threads", "--steps", "2", "--batch.global_size", "4"),
    *("--data.seq_len", "16", "--save.every", "2", "--optim.lr", "1e-2", "--optim.warmup", "0"),
)


def small(cfg: ModelConfig, *, dtype: torch.dtype = torch.float32) -> Memory:
    """Values with which a model trains."""
    values = random_values(cfg, dtype=dtype)
    return Memory(
        {
            name: tensor if tensor.ndim < 2 else 0.1 * tensor
            for name, tensor in values.tensors.items()
        }
    )


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, fast_disk: None) -> Path:
    """A folder in bfloat16 with an unused tokenizer, imported, trained for two steps, exported."""
    base = tmp_path_factory.mktemp("life")
    write(base / "hf", LLAMA, small(LLAMA, dtype=torch.bfloat16))
    (base / "hf" / "tokenizer_config.json").write_text('{"kept": true}')
    edit_config(base / "hf", eos_token_id=7)
    text = "".join(f"{i} weaves with {i + 1}\n" for i in range(500))
    (base / "text.txt").write_text(text)
    data = ("--data.source", str(base / "text.txt"))
    run = str(base / "run")
    assert main(["import", str(base / "hf"), "--out", run, "--compare", "False"]) == 0
    assert main(["train", f"{run}/run.toml", "--resume", "auto", *data, *TRAIN]) == 0
    assert main(["export", run, str(base / "out"), "--compare", "False"]) == 0
    return base


def losses(run: Path) -> list[float]:
    steps = [event for event in read_events(run / EVENTS) if event["event"] == "step"]
    return [event["loss"] for event in steps]


def test_an_imported_run_trains_from_its_values_and_is_exported(life: Path):
    assert len(losses(life / "run")) == 2
    assert checkpoint_path(life / "run", 0).is_dir()
    assert checkpoint_path(life / "run", 2).is_dir()
    before = HfFolder(life / "hf", LLAMA)
    cfg = config_of(life / "out")
    after = HfFolder(life / "out", cfg)
    trained = open_checkpoint(checkpoint_path(life / "run", 2)).section("model")
    for name, shape in before.shapes.items():
        box = Box.whole(shape)
        assert torch.equal(after.read(name, box), trained.read(name, box))
        value_before = before.read(name, box).float()
        value_after = after.read(name, box)
        assert not torch.equal(value_after, value_before)


def test_small_files_of_the_model_come_along(life: Path):
    assert (life / "out" / "tokenizer_config.json").read_text() == '{"kept": true}'
    assert json.loads((life / "out" / "config.json").read_text())["eos_token_id"] == 7
    assert read(str(life / "run" / "run.toml")).get("model.from_hf") is None


def test_a_run_that_starts_from_the_folder_is_the_run_that_starts_from_its_import(
    life: Path, tmp_path: Path
):
    words = ("--data.source", str(life / "text.txt"), *TRAIN, "--save.every", "0")
    for layout, zero in (("pp2 tp2", "0"), ("dp2 tp2", "3")):
        out = tmp_path / layout.replace(" ", "")
        from_hf = ("--model.from_hf", str(life / "hf"), "--mesh", layout, "--parallel.zero", zero)
        assert main(["train", "--out", str(out), *words, *from_hf]) == 0
        if zero == "0":
            assert losses(out) == losses(life / "run")
        else:
            assert losses(out) == pytest.approx(losses(life / "run"), rel=1e-5)


def test_a_type_and_files_of_a_size_may_be_asked_for(
    life: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("--dtype", "float16", "--max_shard_bytes", "9000", "--compare", "False")
    checkpoint = str(checkpoint_path(life / "run", 2))
    assert main(["export", checkpoint, str(tmp_path / "out"), *words]) == 0
    files = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {
        torch.float16
    }
    assert "float16" in capsys.readouterr().out


def test_adapters_of_a_folder_with_values_are_merged_on_export_or_written_alone(
    life: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = str(tmp_path / "run")
    merged = tmp_path / "merged"
    alone = tmp_path / "alone"
    data = (
        "--data.source",
        str(life / "text.txt"),
        "--model.from_hf",
        str(life / "hf"),
        "--out",
        run,
    )
    assert main(["train", *data, *TRAIN, "--lora.rank", "2", "--lora.targets", "q"]) == 0
    assert main(["export", run, str(merged), "--compare", "False"]) == 0
    before = HfFolder(life / "hf", LLAMA)
    after = HfFolder(merged, LLAMA)
    for name, shape in before.shapes.items():
        box = Box.whole(shape)
        values = [each.read(name, box).float() for each in (before, after)]
        assert torch.equal(*values) != name.endswith("attn.q.weight"), name
    assert main(["export", run, str(alone), "--adapters", "True"]) == 0
    assert {path.name for path in alone.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    capsys.readouterr()
    actual = main(["export", str(life / "run"), str(tmp_path / "none"), "--adapters", "True"])
    assert actual == 2
    assert "the model has no adapters to write" in capsys.readouterr().err


def nothing(base: Path) -> None:
    """The folder as it is."""


def changed(**changes: object) -> Callable[[Path], None]:
    return lambda base: edit_config(base / "hf", **changes)


def less(name: str) -> Callable[[Path], None]:
    return lambda base: edit(base / "hf", lambda tensors: tensors.__delitem__(name))


def more(base: Path) -> None:
    edit(
        base / "hf",
        lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(3)}),
    )


def without(name: str) -> Callable[[Path], None]:
    return lambda base: (base / "hf" / name).unlink()


def sharded(base: Path) -> None:
    for path in (base / "hf").iterdir():
        path.unlink()
    write(base / "hf", LLAMA, small(LLAMA), max_shard_bytes=60_000)
    next((base / "hf").glob("model-00002-*")).unlink()


IMPORT = ("import", "{hf}", "--out", "{base}/run")
FROM_HF = ("train", "--model.from_hf", "{hf}", "--out", "{base}/run")
FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "no folder named": (nothing, ("import",), "error: weft import: no folder is named"),
    "folder missing": (
        nothing,
        ("import", "{base}/no", "--out", "x"),
        "error: model.from_hf: {base}/no: no such folder",
    ),
    "a URL": (
        nothing,
        ("train", "--model.from_hf", "https://huggingface.co/openai-community/gpt2"),
        "error: model.from_hf: is a URL (got 'https://huggingface.co/openai-community/gpt2'",
    ),
    "no config.json": (
        without("config.json"),
        IMPORT,
        "error: model.from_hf: {hf}/config.json: no such file. Fix: name a folder that transformers has saved",
    ),
    "no weights": (
        without("model.safetensors"),
        IMPORT,
        "error: model.from_hf: {hf}: holds no weights",
    ),
    "unknown architecture": (
        changed(architectures=["BertModel"]),
        IMPORT,
        "error: model.from_hf: {hf}/config.json: unknown architecture (got 'BertModel'; need one of Deepseek",
    ),
    "unsupported field": (
        changed(sliding_window=8),
        FROM_HF,
        "error: model.from_hf: {hf}/config.json: sliding_window: not what weft",
    ),
    "missing shard": (sharded, FROM_HF, "missing shard"),
    "tensor missing": (
        less("model.norm.weight"),
        FROM_HF,
        "error: model.from_hf: {hf}: 1 tensor is missing (need model.norm.weight)",
    ),
    "tensor left over": (more, IMPORT, "no place for (got model.layers.9.mlp.up_proj.weight)"),
    "contradiction": (
        nothing,
        (*FROM_HF, "--model.dim", "64"),
        "error: model.dim: contradicts {hf} (got 64; need 32). Fix: leave model.dim out",
    ),
    "no run folder": (nothing, ("import", "{hf}"), "error: out: no run folder is named"),
    "unknown key": (nothing, (*IMPORT, "--outt", "x"), "error: outt: unknown key"),
    "one folder to export": (nothing, ("export", "{hf}"), "error: weft export: takes two folders"),
    "export of nothing": (
        nothing,
        ("export", "{base}/no", "{base}/x"),
        "error: model: no such folder (got '{base}/no')",
    ),
    "export of a Hugging Face folder": (
        nothing,
        ("export", "{hf}", "{base}/x"),
        "error: model: is a Hugging Face folder already (got '{hf}'",
    ),
    "export to a type that is none": (
        nothing,
        ("export", "{hf}", "{base}/x", "--dtype", "int4"),
        "error: dtype: unknown value (got 'int4'",
    ),
}


@pytest.fixture
def fresh(tmp_path: Path, fast_disk: None) -> Path:
    write(tmp_path / "hf", LLAMA, small(LLAMA))
    return tmp_path


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_is_reported_in_one_line(
    fresh: Path, capsys: pytest.CaptureFixture[str], name: str
):
    harm, words, message = FAULTS[name]
    harm(fresh)
    places = {"hf": fresh / "hf", "base": fresh}
    assert main([word.format_map(places) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message.format_map(places) in lines[0]
    assert not (fresh / "run").exists()


def test_a_shape_that_does_not_fit_is_reported_before_anything_is_written(
    fresh: Path, capsys: pytest.CaptureFixture[str]
):
    edit_config(fresh / "hf", intermediate_size=48)
    for words in (IMPORT, FROM_HF, (*FROM_HF, "--resume", "auto")):
        folders = {"hf": fresh / "hf", "base": fresh}
        actual = main([word.format_map(folders) for word in words])
        assert actual == 2
        lines = [
            line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")
        ]
        assert len(lines) == 2 * 3, "up, gate and down of both layers"
        assert (
            f"error: model.from_hf: {fresh / 'hf'}: model.layers.0.mlp.up_proj.weight: config.json makes another shape of it"
            in lines[1]
        )
        assert not (fresh / "run").exists()


def test_a_head_that_differs_from_its_tied_embedding_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tied = CONFIGS["llama3 tied"].model_copy(update={"vocab": 256})
    write(tmp_path / "hf", tied, small(tied))
    edit(tmp_path / "hf", lambda tensors: tensors.update({"lm_head.weight": torch.ones(256, 32)}))
    for words in (IMPORT, FROM_HF):
        assert (
            main([word.format_map({"hf": tmp_path / "hf", "base": tmp_path}) for word in words])
            == 2
        )
        assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_a_run_that_continues_from_a_checkpoint_does_not_look_at_its_folder(
    life: Path, tmp_path: Path
):
    write(tmp_path / "hf", LLAMA, small(LLAMA))
    run = str(tmp_path / "run")
    data = ("--data.source", str(life / "text.txt"))
    anew = (
        "train",
        "--model.from_hf",
        str(tmp_path / "hf"),
        "--out",
        run,
        "--resume",
        "auto",
        *data,
        *TRAIN,
    )
    assert main(anew) == 0
    (tmp_path / "hf").rename(tmp_path / "gone")
    assert main(["train", f"{run}/run.toml", "--resume", "auto", "--steps", "3"]) == 0
    assert len(losses(tmp_path / "run")) == 3


def test_nothing_is_imported_or_exported_over_something(
    life: Path, capsys: pytest.CaptureFixture[str]
):
    actual = main(["import", str(life / "hf"), "--out", str(life / "run")])
    assert actual == 2
    assert "error: out: holds a run already" in capsys.readouterr().err
    actual = main(["export", str(life / "run"), str(life / "out")])
    assert actual == 2
    assert f"error: {life / 'out'}: exists already" in capsys.readouterr().err


def test_errors_are_reported_within_two_seconds_and_without_torch(fresh: Path):
    edit_config(fresh / "hf", logit_softcap=8)
    code = (
        "import sys; from weft.cli import main; "
        f"a = main(['import', {str(fresh / 'hf')!r}, '--out', 'x']); "
        f"b = main(['train', '--model.from_hf', {str(fresh / 'hf')!r}]); "
        f"c = main(['export', 'no', 'x']); "
        "sys.exit('torch' in sys.modules or (a, b, c) != (2, 2, 2))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2, (
        "CPU seconds of all three"
    )


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.2}, "--model.dropout 0.1 trains with it"),
        ("llama3", {"attention_dropout": 0.3}, "--model.name hf:llama trains with it"),
        ("llama3", {"attention_dropout": 0.0}, ""),
    ],
)
def test_dropout_of_a_folder_that_is_left_out_is_said(
    tmp_path: Path, family: str, keys: dict[str, float], said: str
) -> None:
    cfg = CONFIGS[family]
    write(tmp_path / "hf", cfg, random_values(cfg))
    edit_config(tmp_path / "hf", **keys)
    run = load(("--model.from_hf", str(tmp_path / "hf")), FAMILIES)
    notes = [note for note in training_notes(run) if "nothing is dropped" in note]
    assert len(notes) == (1 if said else 0)
    assert all(said in note for note in notes)
    if family == "gpt2":
        dropped = load(
            ("--model.from_hf", str(tmp_path / "hf"), "--model.dropout", "0.1"), FAMILIES
        )
        assert not [note for note in training_notes(dropped) if "nothing is dropped" in note]


def test_a_sequence_beyond_the_context_of_a_folder_has_one_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder says how long the context is: another --model.max_seq_len would contradict it."""
    model = CONFIGS["gpt2"].model_copy(update={"vocab": 256})
    write(tmp_path / "hf", model, small(model))
    words = ["--model.from_hf", str(tmp_path / "hf"), "--data.seq_len", "32"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Fix: --data.seq_len 16")


IMPORTS = """
import sys
from weft.errors import UserError
from weft.start.checked_run import load_checked_run

WATCHED = ("torch", "transformers", "transformers.modeling_utils")
for words in {words!r}:
    try:
        load_checked_run(["--model.name", {name!r}, *words.split()])
    except UserError as error:
        imported = [name for name in WATCHED if name in sys.modules]
        print(*imported, error.faults[0].key)
"""


def test_wrong_keys_are_named_before_their_model_is_imported_or_built(tmp_path):
    wrong = {
        "--steps -3": "steps",
        "--optim.name foo": "optim.name",
        "--batch.bogus 3": "batch.bogus",
        "--mesh dq3": "mesh",
    }
    of_model = {"--model.bogus 3": "model.bogus", "--data.seq_len 999999": "data.seq_len"}
    words = (*wrong, *of_model)
    program = IMPORTS.format(words=words, name="hf:olmo2")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines() == [
        *wrong.values(),
        *(f"torch transformers {key}" for key in of_model.values()),
    ]


def test_queries_are_sharded_beside_heads_of_keys_that_ranks_share():
    run = load_checked_run(
        ["--model.name", "hf:qwen2", "--mesh", "cp2 tp4", "--data.seq_len", "16"]
    )
    assert run.model.architecture["kv_heads"] == 2
    axes = json.loads(run.model.architecture["axes"])
    assert axes["layer*.layer.self_attn.q_proj.weight"] == ["heads", None]
    assert axes["layer*.layer.self_attn.o_proj.weight"] == [None, "heads"]
    assert not any("k_proj" in name or "v_proj" in name for name in axes)
