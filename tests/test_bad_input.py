"""Table of invalid input: each gives one line on stderr and exit code 2, before torch is imported, within 2 s."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.cli import main
from weft.config.keys import keys_of
from weft.config.load import load
from weft.errors import EXIT_OK, EXIT_USER
from weft.models import FAMILIES
from weft.start.rules.run_folders import out_faults

LIMIT_S = 2.0
"""CPU time of a rejected command."""

TABLE = {
    "mesh text wrong": ("--mesh", "dp2 tpx", "error: mesh: cannot read 'tpx'"),
    "mesh axis unknown": ("--mesh", "dq2", "error: mesh: unknown axis 'dq'"),
    "tp does not divide heads": (
        "--mesh",
        "tp3",
        "error: mesh: tp3 does not divide the model's heads, ffn (got 4 heads, 352 ffn",
    ),
    "batch does not divide": (
        "--mesh",
        "dp3",
        "error: batch.global_size: does not divide into micro-batches (got 16",
    ),
    "more stages than layers": ("--mesh", "pp8", "more stages than layers (got 8 stages, 4 layers"),
    "split is wrong": ("--pipeline.split", "1", "2", "error: pipeline.split: "),
    "unknown key": (
        "--optim.lrr",
        "1",
        "error: optim.lrr: unknown key. Fix: did you mean 'optim.lr'?",
    ),
    "wrong type": (
        "--optim.lr",
        "fast",
        "error: optim.lr: wrong type (got 'fast'; need a number, above 0)",
    ),
    "out of range": (
        "--steps",
        "0",
        "error: steps: out of range (got 0; need a whole number, at least 1, at most 1000000000000)",
    ),
    "missing data": (
        "--data.source",
        "{tmp}/no.txt",
        "error: data.source: no such file or folder (got '{tmp}/no.txt')",
    ),
    "empty data": (
        "--data.source",
        "{tmp}/empty.txt",
        "error: data.source: is empty (got 0 bytes in {tmp}/empty.txt",
    ),
    "too short data": (
        "--data.source",
        "{tmp}/short.txt",
        "error: data.source: {tmp}/short.txt is too short (got 9 tokens",
    ),
    "token beyond vocabulary": (
        "--data.source",
        "{tmp}/ids.bin",
        "{tmp}/ids.bin holds an id outside the vocabulary at token 1",
    ),
    "no file in the folder": (
        "--data.source",
        "{tmp}/nothing",
        "error: data.source: no file to read in the folder",
    ),
    "unknown schedule": (
        "--pipeline.schedule",
        "1fb1",
        "error: pipeline.schedule: no schedule or table file '1fb1'",
    ),
    "unknown model": (
        "--model.name",
        "lama",
        "error: model.name: unknown model (got 'lama'). Fix: did you mean 'llama3'?",
    ),
    "unknown preset": (
        "--model.preset",
        "gpt2-124",
        "error: model.preset: unknown preset (got 'gpt2-124')",
    ),
    "interleaved, micro-batches do not divide": (
        *("--mesh", "pp2", "--pipeline.schedule", "interleaved", "--batch.global_size", "6"),
        "error: pipeline.schedule: interleaved needs the number of micro-batches to be a multiple of the pipeline ranks",
    ),
    "nproc differs from the mesh": (
        "--mesh",
        "dp2",
        "--nproc",
        "3",
        "error: nproc: differs from the mesh (got 3; need 2",
    ),
    "output below a file": (
        "--out",
        "{tmp}/short.txt/run",
        "error: out: cannot be written (got '{tmp}/short.txt/run'",
    ),
    "output holds a run": (
        "--out",
        "{tmp}/done",
        "error: out: holds a run already (got '{tmp}/done'",
    ),
    "port taken": (
        "--port",
        "{port}",
        "error: port: cannot be opened (got {port}: Address already in use",
    ),
    "sequence does not divide": (
        *("--mesh", "tp2", "--parallel.sequence", "True", "--data.seq_len", "33"),
        "error: data.seq_len: does not divide by tp2 (got 33",
    ),
    "sequence longer than the model takes": (
        *("--model.name", "gpt2", "--data.seq_len", "999"),
        "error: data.seq_len: longer than the positions that the model learns (got 999",
    ),
    "vocabulary too small": (
        "--model.vocab",
        "99",
        "error: model.vocab: is smaller than the tokenizer's (got 99",
    ),
    "parameters with fewer digits than computed": (
        *("--precision.params", "bfloat16"),
        "error: precision.params: does not represent every number of the float32 that is computed in (got bfloat16; need",
    ),
    "sums with fewer digits than computed": (
        *("--precision.reduce", "bfloat16", "--precision.compute", "float16"),
        "error: precision.reduce: would drop digits of gradients, which are float16 (got bfloat16",
    ),
    "float16 parameters": (
        *("--precision.params", "float16", "--precision.compute", "float16"),
        "error: precision.params: float16 has no numbers as small as an optimizer's",
    ),
    "heads for ulysses": (
        *("--mesh", "cp8", "--parallel.context", "ulysses"),
        "heads % cp == 0, and cp8 does not divide the heads (got 4 heads; need a multiple of cp). Fix: --parallel.con",
    ),
    "experts for ep": (
        *("--model.name", "deepseek", "--mesh", "ep3", "--batch.global_size", "24"),
        "error: mesh: ep3 does not divide the model's experts (got 8 experts; need a divisor of each). Fix: --mesh ep",
    ),
    "ep without experts": (
        "--mesh",
        "ep2",
        "error: mesh: ep2 shards experts, and llama3 has none (got ep2; need a mix",
    ),
    "chunks for zbv": (
        *("--mesh", "pp2", "--pipeline.schedule", "zbv", "--pipeline.chunks", "1"),
        "error: pipeline.chunks: zbv does not work with 1 chunk a rank (need 2). Fix: --pipeline.chunks 2",
    ),
    "layers for dual_pipe_v": (
        *("--mesh", "pp4", "--pipeline.schedule", "dual_pipe_v"),
        "more stages than layers (got 8 stages, 4 layers; need at most 6 stages: the layers, embed and head). Fix: --mesh",
    ),
    "chunks for zero_bubble": (
        *("--mesh", "pp2", "--pipeline.schedule", "zero_bubble_h2", "--pipeline.chunks", "2"),
        "error: pipeline.chunks: zero_bubble_h2 does not work with 2 chunks a rank (need 1). Fix: --pipeline.ch",
    ),
    "length for cp": (
        *("--mesh", "cp4", "--data.seq_len", "100"),
        "error: data.seq_len: does not divide by cp4 (got 100; need a multiple of 8: two chunks for each of cp4). Fix: ",
    ),
    "length for cp under sequence parallelism": (
        *("--mesh", "cp2 tp2", "--data.seq_len", "66", "--parallel.sequence", "True"),
        "error: data.seq_len: does not divide by cp2 x tp2 (got 66; need a multiple of 4",
    ),
    "cp for images": (
        "--model.name",
        "mnist",
        "--mesh",
        "cp2",
        "error: mesh: cp shards sequences, and mnist reads images",
    ),
    "sequence parallelism for images": (
        *("--model.name", "mnist", "--mesh", "tp2", "--parallel.sequence", "True"),
        "error: parallel.sequence: shards activations along the sequence, and mnist reads images (got True; need False)",
    ),
    "recompute unknown": (
        *("--parallel.recompute", "some"),
        "error: parallel.recompute: unknown value (got 'some'; need none, selective, full, offload, of the first layers "
        "of a stage alone as full:12, or auto)",
    ),
    "zero unknown": (
        "--parallel.zero",
        "4",
        "error: parallel.zero: unknown value (got '4'; need one of 0, 1, 2, 3)",
    ),
    "a sample of images": (
        *("--model.name", "mnist", "--sample", "4"),
        "error: sample: mnist reads images and generates no text (got 4; need 0). Fix: --sample 0",
    ),
    "a sample without a tokenizer": (
        *("--data.source", "{tmp}/long.bin", "--model.vocab", "1000", "--sample", "4"),
        "error: sample: nothing says which tokenizer belongs to these token files (got 1000 tokens, data.tokenizer bytes)",
    ),
    "missing config": ("{tmp}/no.toml", "error: config: no such file (got '{tmp}/no.toml'"),
    "config is not TOML": ("{tmp}/bad.toml", "error: config: {tmp}/bad.toml is not TOML"),
    "unknown key in the config": ("{tmp}/typo.toml", "error: optim.lerning_rate: unknown key"),
}


TORCHRUN = {
    "WORLD_SIZE": "3",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "node[1-2]",
}


@pytest.fixture(autouse=True)
def _no_world(monkeypatch):
    for name in (*TORCHRUN, *SRUN):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the wrong files and a port in use: values of the braces in the table."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "text.txt").write_text("long enough " * 50)
    np.array([1, 700, 3], dtype="<u2").tofile(tmp_path / "ids.bin")
    np.arange(900, dtype="<u2").tofile(tmp_path / "long.bin")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "events.jsonl").touch()
    (tmp_path / "bad.toml").write_text("steps == 3")
    (tmp_path / "typo.toml").write_text("[optim]\nlerning_rate = 3")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield {"tmp": str(tmp_path), "port": taken.getsockname()[1]}


def files_below(folder):
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("case", TABLE)
def test_invalid_input_gives_one_line(case, place, capsys, tmp_path):
    *words, line = (word.format_map(place) for word in TABLE[case])
    before = files_below(tmp_path)
    assert main(["train", *words]) == EXIT_USER
    captured = capsys.readouterr()
    assert captured.out == ""
    reported = captured.err.splitlines()
    assert len(reported) == 1
    assert line in reported[0]
    assert files_below(tmp_path) == before


def cpu_of_children_s():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_weft(*words, **env):
    """What a process printed and imported, and its CPU time: other processes may have the cores."""
    start_s = cpu_of_children_s()
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "weft", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )
    seconds = cpu_of_children_s() - start_s
    lines = ran.stderr.splitlines()
    imported = {
        line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")
    }
    return ran, [line for line in lines if not line.startswith("import time:")], imported, seconds


@pytest.mark.parametrize(
    ("case", "env"),
    [
        ("tp does not divide heads", {}),
        ("token beyond vocabulary", {}),
        ("port taken", {}),
        ("output below a file", {}),
        ("unknown key in the config", {}),
    ],
)
def test_invalid_input_ends_a_process_before_torch_is_imported(case, env, place):
    *words, line = (word.format_map(place) for word in TABLE[case])
    ran, reported, imported, seconds = run_weft("train", *words, **env)
    assert ran.returncode == EXIT_USER
    assert ran.stdout == ""
    assert line in reported[0]
    assert len(reported) == 1
    assert "torch" not in imported
    assert "weft.config.schema" in imported
    assert seconds < LIMIT_S


KEYS = sorted(
    {key for name in FAMILIES for key in keys_of(type(load(["--model.name", name], FAMILIES)))}
)
NASTY = r"""
0 1 -1 2 3 7 0.5 1e400 nan -inf 1e3 0x10 True None é dp2 tp2 dp0 pp99999999 dp1000000000000000000000 / /dev/null /dev/zero
/proc /proc/self/mem nothing short.txt ids.bin bad.toml *.bin [ ** ~ ~missing-user stdlib digits llama3 gpt2 mnist llama3-8b
mnist-conv interleaved gpipe 1f1b -x = 99999999999999999999999 65536 cuda auto adamw float64 ' {}
"""
flags = st.tuples(
    st.sampled_from([*KEYS, "x", "model", "optim.", "..", "=", "", "optim.lr.x"]).map(
        "--{}".format
    ),
    st.lists(st.sampled_from([*NASTY.split(), "\udcff", "", "a b", "a\nb", "a" * 300]), max_size=2),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(flags.map(lambda flag: [flag[0], *flag[1]]), max_size=4),
    name=st.sampled_from(["train", "explain"]),
)
def test_any_words_give_a_run_or_lines_of_faults(words, name, place, capsys, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "weft.start.train_run", types.SimpleNamespace(train=lambda _run, **_: EXIT_OK)
    )
    flags = [word for flag in words for word in flag]
    code = main([name, "--data.source", "text.txt", *flags])
    reported = capsys.readouterr().err.splitlines()
    assert code in (EXIT_OK, EXIT_USER)
    for line in reported:
        assert line.startswith("error: " if code else "note: ")
    assert reported or code == EXIT_OK


def test_all_faults_are_reported_together(place, capsys):
    words = [
        "--mesh",
        "tp3",
        "--batch.global_size",
        "7",
        "--optim.lrr",
        "1",
        "--seed",
        "x",
        "--nproc",
        "2",
    ]
    words += ["--data.source", "nowhere", "--out", "done", "--port", str(place["port"])]
    assert main(["train", *words]) == EXIT_USER
    keys = [
        line.removeprefix("error: ").partition(":")[0]
        for line in capsys.readouterr().err.splitlines()
    ]
    expected = [
        "optim.lrr",
        "seed",
        "mesh",
        "batch.global_size",
        "data.source",
        "nproc",
        "out",
        "port",
    ]
    assert keys == expected


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            TORCHRUN,
            "error: mesh: differs from the world size (got 3 ranks started; need 2 for 'dp2'). Fix: start 2 ranks",
        ),
        (
            SRUN,
            "error: mesh: differs from the world size (got 4 ranks started; need 2 for 'dp2'). Fix: start 2 ranks",
        ),
        (
            {"WORLD_SIZE": "3"},
            "error: mesh: differs from the world size (got WORLD_SIZE=3; need 2 for 'dp2')",
        ),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "error: MASTER_PORT: is no number (got 'x')"),
    ],
)
def test_a_world_of_another_size_than_the_mesh_is_rejected(env, line, place, capsys, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--mesh", "dp2"]) == EXIT_USER
    (reported,) = capsys.readouterr().err.splitlines()
    assert reported.startswith(line)


def test_a_fault_is_printed_once_a_machine(place, capsys, monkeypatch):
    monkeypatch.setattr("weft.cli.PATIENCE_S", 0.0)
    for name, value in {**TORCHRUN, "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--mesh", "dp2"]) == EXIT_USER
    assert capsys.readouterr().err == ""


def test_other_ranks_do_not_check_the_folder_that_the_first_one_writes(place, monkeypatch):
    assert len(list(out_faults("done", None))) == 1
    monkeypatch.setenv("RANK", "1")
    assert not list(out_faults("done", None))


def test_cuda_without_a_gpu_is_rejected(place, capsys, monkeypatch):
    monkeypatch.setattr("weft.start.environment.GPU_FILES", ("/nowhere/gpu*",))
    monkeypatch.setattr("weft.start.environment.torch_version", lambda: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["train", "--device", "cuda"]) == EXIT_USER
    assert (
        "error: device: there is no GPU (got cuda; need cpu). Fix: --device cpu, or auto"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", "--device", "cuda"]) == EXIT_USER
    assert "CUDA_VISIBLE_DEVICES hides all GPUs" in capsys.readouterr().err
    monkeypatch.setattr("weft.start.environment.torch_version", lambda: "2.13.0+cpu")
    assert main(["train", "--device", "cuda"]) == EXIT_USER
    assert "this torch is built without CUDA" in capsys.readouterr().err
