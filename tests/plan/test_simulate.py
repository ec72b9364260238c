"""`weft simulate`: its words, its text in 80 columns, its JSON and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.view.test_timelines import assert_valid_trace
from weft import cli
from weft.config.command_options import take_options
from weft.errors import EXIT_OK, EXIT_USER
from weft_plan.commands.simulate_options import SimulateOptions, read_share, read_slow

SMALL = (
    "--mesh pp2,dp2 --model.layers 2 --model.dim 32 --model.heads 2 --model.kv_heads 1 --model.ffn 48"
    " --data.seq_len 16 --batch.global_size 8 --batch.micro_size 1 --parallel.zero 2"
).replace(",", " ")
ON_H100 = [*SMALL.split(), "--hardware", "h100"]
FAILURES = [
    "--mtbf-hours",
    "50000",
    "--checkpoint-s",
    "30",
    "--restart-s",
    "300",
    "--save.every",
    "100",
]


def test_words_of_the_command_and_of_the_config_may_be_mixed() -> None:
    words = "--mesh pp2 dp2 --slow 0=2 1=3 run.toml --jitter=5% --optim.lr 0.1 --mtbf-hours 5"
    own, config = take_options(words.split(), SimulateOptions)
    assert own == SimulateOptions(slow=("0=2", "1=3"), jitter="5%", mtbf_hours=5)
    assert config == ["--mesh", "pp2", "dp2", "run.toml", "--optim.lr", "0.1"]


def test_shares_and_slow_ranks_are_read() -> None:
    assert [read_share(text) for text in ("5%", "0.05", ".05", "100%", "0")] == [
        0.05,
        0.05,
        0.05,
        1.0,
        0.0,
    ]
    assert [read_share(text) for text in ("5", "-5%", "5 %", "nan", "")] == [None] * 5
    assert read_slow("3=1.3") == (3, 1.3)
    assert [read_slow(text) for text in ("3", "3=0", "-1=2", "3=x", "3=1e9")] == [None] * 5


def test_without_a_device_costs_are_units_of_a_forward(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *SMALL.split()]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "1 unit: the mean forward of a stage" in printed
    assert "units (predicted)" in printed


def test_a_device_gives_seconds_jitter_slow_ranks_and_goodput(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--jitter", "5%", "--draws", "20", "--slow", "3=1.5", *FAILURES]
    files = {name: tmp_path / f"step.{name}" for name in ("svg", "html", "perfetto")}
    words = []
    for name, file in files.items():
        words += [f"--{name}", str(file)]
    assert cli.main(["simulate", *ON_H100, *options, *words]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    for line in lines:
        if not line.startswith("wrote"):
            assert len(line) <= 80
    text = "\n".join(lines)
    for part in (
        "with slow ranks (3 x 1.5)",
        "jitter of 5%",
        "(20 steps drawn)",
        "failures: a device every 50,000 h, so one of 4",
        "stops training for 30 s, a restart for 300 s",
        "this run: every 100 steps",
        "200 steps take",
    ):
        assert part in text, part
    assert cli.main(["simulate", *ON_H100, *options, "--json"]) == EXIT_OK
    fields = json.loads(capsys.readouterr().out)
    jitter = fields["jitter"]
    assert jitter["p5_s"] < jitter["p50_s"] < jitter["p95_s"]
    assert fields["step"]["bubble"] < fields["jitter"]["mean_bubble"] < 1
    assert fields["slow"]["step"]["step_s"] > fields["step"]["step_s"]
    parts = [fields["step"][f"{name}_s"] for name in ("targets", "pipeline", "reduce", "update")]
    assert fields["step"]["step_s"] == pytest.approx(sum(parts))
    account = fields["goodput"]
    shares = [account[name] for name in ("goodput", "checkpoints", "lost", "restarts")]
    assert sum(shares) == pytest.approx(1.0)
    trace = json.loads(files["perfetto"].read_text(encoding="utf-8"))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert_valid_trace(trace, len(spans))
    kinds = {event["cat"] for event in spans}
    assert kinds >= {"F", "B", "reduce_scatter", "all_gather", "send", "reduce", "update"}


@pytest.mark.slow
def test_a_checkpoint_holds_parameters_and_states_once(capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW: a parameter and two states of it, 4 bytes each; whatever the replicas."""
    sizes = set()
    for layout in ("--mesh dp2", "--mesh dp2 --parallel.zero 1"):
        words = [*SMALL.replace("--mesh pp2 dp2", layout).replace("--parallel.zero 2", "").split()]
        assert cli.main(["simulate", *words, "--hardware", "h100", "--json"]) == EXIT_OK
        sizes.add(json.loads(capsys.readouterr().out)["checkpoint_bytes"])
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--jitter", "5%"], "jitter: is about seconds, and no device is named (need hardware)"),
        (["--jitter", "7", "--hardware", "h100"], "jitter: out of range (got '7'; need a share"),
        (["--slow", "9=2", "--hardware", "h100"], "slow: there is no such rank (got '9=2'; need"),
        (["--slow", "x", "--hardware", "h100"], "slow: cannot be read (got 'x'; need RANK=FACTOR"),
        (["--restart-s", "9"], "restart_s: is about failures, and no mean time between them"),
        (
            ["--mtbf-hours", "9", "--hardware", "h100"],
            "mtbf_hours: needs the cost of a checkpoint (need checkpoint_s or storage_gb_s)",
        ),
        (["--mtbf-hours", "0"], "mtbf_hours: out of range (got 0"),
        (["--html", "missing/x.html"], "html: cannot write the file (got 'missing/x.html'"),
        (["--jiter", "5%"], "jiter: unknown key"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *SMALL.split(), *words]) == EXIT_USER
    (reported,) = capsys.readouterr().err.splitlines()
    assert reported.startswith(f"error: {line}")


def test_files_are_written_beside_json_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, page = tmp_path / "x.svg", tmp_path / "x.html"
    words = ["simulate", *SMALL.split(), "--svg", str(picture), "--html", str(page)]
    assert cli.main([*words, "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["timeline"]
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert "<html" in page.read_text(encoding="utf-8")
