"""`weft explain` prints memory, traffic and FLOPs of every role of a run, as text and as JSON."""

from __future__ import annotations

import json

import pytest

from weft.cli import main
from weft.core.mesh import WIDTH

SMALL = ["--model.layers", "2", "--model.dim", "32", "--model.ffn", "48", "--data.seq_len", "16"]


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *SMALL, *words]) == 0
    return capsys.readouterr().out


def test_the_text_fits_80_columns_and_says_whether_the_run_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = explained(capsys, "--mesh", "pp2 dp2", "--hardware", "h100")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "memory of a rank" in text
    assert "fits NVIDIA H100" in text


def test_json_holds_the_plan_and_the_costs(capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads(explained(capsys, "--mesh", "pp2", "--json", "--hardware", "a100"))
    assert fields["plan"]["mesh"] == "pp2"
    first, last = fields["roles"]
    assert (first["pp"], last["pp"]) == (0, 1)
    kept = ("params_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes")
    held = sum(first[name] for name in kept)
    assert first["peak_bytes"] == held + first["in_flight_bytes"] + first["workspace_bytes"]
    assert fields["hardware"]["left_bytes"] == 80 * 10**9 - max(
        role["peak_bytes"] for role in fields["roles"]
    )


def test_a_model_that_is_too_large_misses_by_so_much(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--model.preset", "llama3-8b", "--hardware", "h100"]
    words += ["--batch.global_size", "1", "--batch.micro_size", "1"]
    assert main(words) == 0
    assert "does NOT fit NVIDIA H100" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["mnist", "deepseek", "gpt2"])
def test_every_kind_of_model_is_measured(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model.name", family]) == 0
    assert "floating-point operations" in capsys.readouterr().out
