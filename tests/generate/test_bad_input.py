"""Invalid requests are rejected in one line before torch is imported, exit code 2."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generate.stored import write_checkpoint, write_run
from tests.user_models import two_streams
from weft.cli import main
from weft.errors import EXIT_USER

LIMIT_S = 2.0
"""Of CPU time: elapsed time depends on the load of the machine."""
RUN = "{tmp}/llama3"
ASK = (RUN, "--prompt", "x")
TABLE = {
    "nothing named": ((), "error: weft generate: takes one model (got nothing; need a run, a checkpoint or a folder)"),
    "no such run": (("{tmp}/none",), "error: model: no such folder (got '{tmp}/none'). Fix: give a run's folder"),
    "a file": (("{tmp}/bad.jsonl",), "error: model: is no folder (got '{tmp}/bad.jsonl'). Fix: give a run's folder"),
    "no model there": (
        ("{tmp}",),
        "error: model: the folder holds no model (got '{tmp}'; need run.toml (a run), manifest.json (a checkpoint) or",
    ),
    "no checkpoint": (
        ("{tmp}/unsaved",),
        "error: {tmp}/unsaved: the run has no checkpoint (got nothing in ckpt/). Fix: train with --save.every 100",
    ),
    "images": (("{tmp}/mnist",), "error: {tmp}/mnist: mnist generates no text (need a language model: deepseek, "),
    "damaged": (("{tmp}/damaged",), "manifest.json and its checksum do not agree"),
    "dp": ((*ASK, "--mesh", "dp2"), "error: mesh: dp would generate the same texts again: one call takes any number of --samp"),
    "cp beside tp": ((*ASK, "--mesh", "cp2 tp2"), "need pp, ep and tp alone). Fix: --mesh tp2 or give its ranks to tp"),
    "tp does not divide": ((*ASK, "--mesh", "tp3"), "error: mesh: tp3 does not divide the model's heads, ffn (got 4 heads"),
    "no experts": ((*ASK, "--mesh", "ep2"), "error: mesh: ep2 shards experts, and llama3 has none"),
    "more stages than layers": ((*ASK, "--mesh", "pp5"), "more stages than layers (got 5 stages, 2 layers"),
    "mesh text": ((*ASK, "--mesh", "tpx"), "error: mesh: cannot read 'tpx'"),
    "unknown key": ((RUN, "--temprature", "1"), "error: temprature: unknown key. Fix: did you mean 'temperature'?"),
    "cold": ((RUN, "--temperature", "-1"), "error: temperature: out of range (got -1.0; need a number, at least 0"),
    "top_p above 1": ((RUN, "--top_p", "1.5"), "error: top_p: out of range (got 1.5; need a number, above 0"),
    "top_p 0": ((RUN, "--top_p", "0"), "error: top_p: out of range (got 0.0"),
    "top_k 0": ((RUN, "--top_k", "0"), "error: top_k: out of range (got 0"),
    "no tokens": ((RUN, "--tokens", "0"), "error: tokens: out of range (got 0; need a whole number, at least 1"),
    "empty prompt": ((RUN,), "error: prompt: is empty, and the tokenizer bytes has no token that begins a document"),
    "token unknown": (("{tmp}/ascii", "--prompt", "\N{SNOWMAN}"), "error: prompt: has token 226 of the tokenizer bytes"),
    "context full": (
        ("{tmp}/gpt2", "--prompt", "a" * 16),
        "error: prompt: leaves no position for another token (got 16 tokens; need fewer than the model's 16 positions)",
    ),
    "no prompt file": ((RUN, "--prompt_file", "{tmp}/no.txt"), "error: prompt_file: cannot be read (got '{tmp}/no.txt'"),
    "two prompts": ((RUN, "--prompt_file", "x", "--prompt", "y"), "error: prompt_file: is given together with --prompt"),
    "no prompt on a line": ((RUN, "--prompt_file", "{tmp}/bad.jsonl"), "error: prompt_file: line 2 of {tmp}/bad.jsonl is"),
    "no tokenizer": ((RUN, "--tokenizer", "{tmp}/no.json"), "error: tokenizer: cannot read the tokenizer (got '{tmp}/no"),
    "tokenizer unknown": (("{tmp}/numbers", "--prompt", "a"), "error: tokenizer: nothing says which tokenizer belongs to"),
    "json folder": ((RUN, "--json", "{tmp}/no/x.json"), "error: json: its folder does not exist (got '{tmp}/no')"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("bad") / "input"
    write_checkpoint(base / "llama3", write_run(base / "llama3"))
    short = write_run(
        base / "gpt2", "--model.name", "gpt2", "--model.max_seq_len", "16", "--data.seq_len", "16"
    )
    write_checkpoint(base / "gpt2", short)
    write_checkpoint(base / "ascii", write_run(base / "ascii", "--model.vocab", "128"))
    numbers = write_run(base / "numbers", "--model.vocab", "300", "--data.source", "x.bin")
    write_checkpoint(base / "numbers", numbers)
    write_run(base / "unsaved")
    (base / "mnist").mkdir()
    (base / "mnist" / "run.toml").write_text('[model]\nname = "mnist"\n')
    run = write_run(base / "damaged")
    manifest = write_checkpoint(base / "damaged", run) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"seed":1', b'"seed":2'))
    (base / "bad.jsonl").write_text('"fine"\n{"text": 1}\n')
    return base


@pytest.mark.parametrize("name", TABLE)
def test_one_line_and_exit_code_2(name: str, tmp: Path, capsys: pytest.CaptureFixture[str]):
    words, message = TABLE[name]
    code = main(["generate", *(word.format(tmp=tmp) for word in words)])
    out, err = capsys.readouterr()
    assert message.format(tmp=tmp) in err
    assert code == EXIT_USER
    assert out == ""
    assert err.count("\n") == 1


def test_all_faults_are_reported_before_torch_is_imported(tmp: Path):
    script = "import sys; from weft.cli import main; code = main(); sys.exit(9 if 'torch' in sys.modules else code)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["generate", str(tmp / "llama3"), "--mesh", "dp2 tp3"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == EXIT_USER, done.stderr
    assert [line[:9] for line in done.stderr.splitlines()] == [
        "error: me",
        "error: me",
        "error: pr",
    ]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    actual = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert actual < LIMIT_S


def test_another_number_of_ranks_than_the_mesh_has(
    tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    argv = ["generate", str(tmp / "llama3"), "--prompt", "x", "--mesh", "tp2"]
    assert main(argv) == EXIT_USER
    message = "error: mesh: differs from the world size (got 4 ranks started; need 2 for 'tp2'). Fix: start 2 ranks, or choose"
    assert message in capsys.readouterr().err


def test_no_file_is_written(tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir("/proc")
    assert (
        main(
            [
                "generate",
                str(tmp / "llama3"),
                "--prompt",
                "x",
                "--tokens",
                "1",
                "--transport",
                "threads",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("x")


def test_an_export_without_tokenizer_is_noted_and_named_on_generation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "run", write_run(tmp_path / "run"))
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(exported), "--compare", "False"]) == 0
    note = f"note: {exported} gets no tokenizer.json: weft generate {exported} --prompt TEXT --tokenizer bytes\n"
    assert note in capsys.readouterr().err
    argv = ["generate", str(exported), "--prompt", "a"]
    assert main(argv) == EXIT_USER
    assert f"tokenizer: {exported} has no tokenizer.json. Fix: " in capsys.readouterr().err


def test_a_model_without_logits_of_each_token_generates_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = Path(two_streams.__file__).read_text(encoding="utf-8")
    loss = """
class Loss(nn.Module):
    def forward(self, both, batch):
        return nn.functional.cross_entropy(both[1].flatten(0, 1), batch.targets.flatten(), reduction="sum")
"""
    source = source.replace("return self.proj(", "return self.proj(streams['x']), self.proj(")
    source = source.replace('"head": Head(c)}', '"head": Head(c), "loss": Loss()}')
    model = tmp_path / "two_outputs.py"
    model.write_text(source.replace("\ndef blocks", f"{loss}\n\ndef blocks"), encoding="utf-8")
    out = str(tmp_path / "run")
    words = f"{model} --steps 1 --prove.before never --batch.global_size 2 --data.seq_len 16"
    train = ["train", *words.split(), "--out", out, "--report", "False"]
    assert main([*train, "--sample", "4"]) == EXIT_USER
    wanted = f"error: sample: head of {model} yields no logits of each token, so there is no text"
    assert wanted in capsys.readouterr().err
    assert main(train) == 0
    capsys.readouterr()
    assert main(["generate", out, "--prompt", "a", "--tokens", "2", "--transport", "threads"])
    told = capsys.readouterr().err
    assert "model: its last output is no logits of each token" in told
    assert "Traceback" not in told
