"""`weft generate`: its output, from runs and checkpoints, on several layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generate.stored import write_checkpoint, write_run
from tests.programs import WEFT, programs
from weft.cli import main
from weft.errors import EXIT_OK
from weft.generate.job import make_job
from weft.generate.model_source import find_model
from weft.generate.request import Request

FAST = ("--transport", "threads", "--dtype", "float64", "--tokens", "8", "--seed", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs by their model's name; the weights of an untrained model make each token about as likely
    as any other.
    """
    base = tmp_path_factory.mktemp("runs")
    families = {
        "llama3": (),
        "gpt2": ("--model.max_seq_len", "16", "--data.seq_len", "16"),
        "qwen3-moe": (),
    }
    for name, more in families.items():
        run = write_run(base / name, "--model.name", name, *more)
        write_checkpoint(base / name, run)
    deep = write_run(base / "deepseek", "--model.name", "deepseek", "--model.mtp_depth", "1")
    write_checkpoint(base / "deepseek", deep)
    return base


def stdout_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Output of a command."""
    code = main(["generate", *map(str, words)])
    out, err = capsys.readouterr()
    assert code == EXIT_OK, err
    return out


def objects(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, object]]:
    lines = stdout_of(capsys, *words, *FAST, "--json").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama3", "pp2 tp2"), ("qwen3-moe", "ep2"), ("deepseek", "ep2 tp2")]
)
def test_every_layout_prints_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, mesh: str
):
    asked = (folder / name, "--prompt", "def ", "--samples", "3")
    assert objects(capsys, *asked, "--mesh", mesh) == objects(capsys, *asked)


def test_processes_generate_what_threads_generate(folder: Path, capsys: pytest.CaptureFixture[str]):
    asked = (folder / "llama3", "--prompt", "def ", *FAST)
    words = [*map(str, asked), "--mesh", "tp2", "--transport", "process"]
    done = programs().run(WEFT, "generate", *words)
    assert done.stdout == stdout_of(capsys, *asked), done.stderr
    assert "8 tokens; 4 tokens of prompt read in" in done.stderr


def test_a_checkpoint_generates_what_its_run_generates(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    run = folder / "llama3"
    prompt = ("--prompt", "x")
    actual = objects(capsys, run / "ckpt" / "step-000003", *prompt)
    assert actual == objects(capsys, run, *prompt)


def test_a_json_object_holds_the_text_and_its_facts(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    first, second = objects(capsys, folder / "llama3", "--prompt", "a", "--samples", "2")
    assert first["prompt"] == "a"
    assert first["sample"] == 0
    assert second["sample"] == 1
    assert first["end"] == "length"
    assert bytes(first["tokens"]).decode(errors="replace") == first["text"]  # type: ignore[arg-type]
    assert first["tokens"] != second["tokens"]
    assert first["seed"] == 4


def test_a_text_depends_on_its_own_prompt_and_sample_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"ab"\n{"prompt": "a longer one"}\n\n')
    together = objects(capsys, folder / "llama3", "--prompt_file", file, "--samples", "2")
    alone = objects(capsys, folder / "llama3", "--prompt", "ab", "--samples", "2")
    assert [each["prompt"] for each in together] == ["ab", "ab", "a longer one", "a longer one"]
    assert together[:2] == alone


def test_text_output_is_prompt_and_continuation(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "prompt.txt").write_text("def f(x):\n    ")
    (found,) = objects(capsys, folder / "llama3", "--prompt_file", tmp_path / "prompt.txt")
    out = stdout_of(capsys, folder / "llama3", "--prompt_file", tmp_path / "prompt.txt", *FAST)
    assert out == f"def f(x):\n    {found['text']}\n"


def test_several_texts_are_numbered(folder: Path, capsys: pytest.CaptureFixture[str]):
    one, other = (
        each["text"]
        for each in objects(capsys, folder / "llama3", "--prompt", "a", "--samples", "2")
    )
    out = stdout_of(capsys, folder / "llama3", "--prompt", "a", "--samples", "2", *FAST)
    assert out == f"--- 1 of 2\na{one}\n\n--- 2 of 2\na{other}\n"


def test_greedy_texts_of_one_prompt_are_equal(folder: Path, capsys: pytest.CaptureFixture[str]):
    one, other = objects(
        capsys, folder / "llama3", "--prompt", "a", "--samples", "2", "--temperature", "0"
    )
    assert one["tokens"] == other["tokens"]


def test_a_text_ends_before_its_stop_text(folder: Path, capsys: pytest.CaptureFixture[str]):
    (whole,) = objects(capsys, folder / "llama3", "--prompt", "a")
    tokens = list(whole["tokens"])  # type: ignore[call-overload]
    at = 1
    while tokens[at] >= 128:
        at += 1
    stop = chr(tokens[at])
    (found,) = objects(capsys, folder / "llama3", "--prompt", "a", "--stop", stop)
    assert found["end"] == "stop"
    assert found["tokens"] == tokens[: at + 1]
    assert found["text"] == str(whole["text"]).partition(stop)[0]


def test_the_end_of_learned_positions_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]):
    code = main(["generate", str(folder / "gpt2"), "--prompt", "a" * 10, *FAST, "--json"])
    out, err = capsys.readouterr()
    assert code == EXIT_OK
    assert json.loads(out)["end"] == "context"
    assert len(json.loads(out)["tokens"]) == 6
    assert (
        "note: a prompt of 10 tokens and 8 more pass the model's 16 positions: texts end there"
        in err
    )
    assert "note: 1 of 1 texts end with the model's last position, 16" in err


def test_rotary_models_generate_beyond_their_training_length(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (found,) = objects(capsys, folder / "llama3", "--prompt", "a" * 200)
    assert found["end"] == "length"


def test_generation_uses_the_compute_dtype_and_no_training_blocks(tmp_path: Path):
    words = (
        "--model.name",
        "deepseek",
        "--model.mtp_depth",
        "1",
        "--precision.compute",
        "bfloat16",
    )
    run = write_run(tmp_path / "run", *words)
    write_checkpoint(tmp_path / "run", run)
    job = make_job(Request(prompt="x"), find_model(str(tmp_path / "run")))
    assert job.plan.compute == "bfloat16"
    assert job.plan.params == "bfloat16"
    for stage in job.plan.stages:
        for block in stage.blocks:
            assert not block.startswith("mtp")
    asked = make_job(Request(prompt="x", dtype="float32"), find_model(str(tmp_path / "run")))
    assert asked.plan.compute == "float32"
