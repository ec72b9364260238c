"""`weft explain` prints memory, traffic and FLOPs of every role of a run, as text, as JSON and as a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

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
    assert "note: computes in float32; --precision.compute bfloat16 has 15 times the" in text


ROLE_FIELDS = {
    *("pp", "ranks", "params_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes"),
    *("in_flight_bytes", "workspace_bytes", "workspace_parts", "peak_bytes", "peak_at", "levels"),
    *("flops", "traffic"),
}
PLAN_PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_json_holds_the_plan_and_the_costs(capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads(explained(capsys, "--mesh", "pp2", "--json", "--hardware", "a100"))
    assert set(fields) == {
        *("plan", "roles", "worst_routing", "world_check", "hardware", "time", "types", "data")
    }
    assert set(fields["roles"][0]) == ROLE_FIELDS
    assert fields["world_check"]["holds"]
    documented = set(re.findall(r"`(\w+)`", PLAN_PAGE.read_text(encoding="utf-8")))
    for section in ("roles", "world_check", "hardware", "time", "types", "data"):
        names = fields[section][0] if section == "roles" else fields[section]
        assert set(names) <= documented, section
    assert fields["plan"]["mesh"] == "pp2"
    first, last = fields["roles"]
    assert first["pp"] == 0
    assert last["pp"] == 1
    kept = ("params_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes")
    held = sum(first[name] for name in kept)
    assert first["peak_bytes"] == held + first["in_flight_bytes"] + first["workspace_bytes"]
    expected = 80 * 10**9 - max(role["peak_bytes"] for role in fields["roles"])
    assert fields["hardware"]["left_bytes"] == expected


class Tags(HTMLParser):
    """Tags of a page, and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "rect", "line", "path", "circle"):
            self.open.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag == self.open[-1]:
            self.open.pop()


def test_a_page_with_charts_that_fetches_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "explain.html"
    words = ("--mesh", "pp2", "--hardware", "h100", "--html", str(page))
    assert f"wrote {page}" in explained(capsys, *words)
    text = page.read_text(encoding="utf-8")
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    assert {"svg", "table", "details"} <= parser.tags
    assert "script" not in parser.tags
    for part in ("peak", "fits NVIDIA H100", "no deadlock", "all_gather", "Predicted time"):
        assert part in text


def test_without_a_device_the_largest_known_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Eight layers of LLaMA 3 405B in float32 are more than a device has."""
    words = ["explain", "--model.preset", "llama3-405b", "--model.layers", "8", "--mesh", "dp2"]
    assert main([*words, "--batch.global_size", "4"]) == 0
    text = capsys.readouterr().out
    assert "does NOT fit any known device: the largest, " in text


def test_a_model_that_is_too_large_misses_by_so_much(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--model.preset", "llama3-8b", "--hardware", "h100"]
    words += ["--batch.global_size", "1", "--batch.micro_size", "1"]
    assert main(words) == 0
    assert "does NOT fit NVIDIA H100" in capsys.readouterr().out


def test_both_routings_of_experts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--model.name", "deepseek", "--model.layers", "2", "--mesh", "ep2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "floating-point operations" in text
    expected = re.search(r"expected  peak .*, (\S+ \S+) sent to experts, (\S+) FLOPs", text)
    worst = re.search(r"worst     peak .*, (\S+ \S+) sent to experts, (\S+) FLOPs", text)
    assert expected is not None
    assert worst is not None
    assert float(worst[2]) > float(expected[2])


@pytest.mark.parametrize("family", ["mnist", "gpt2"])
def test_every_kind_of_model_is_measured(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model.name", family]) == 0
    assert "floating-point operations" in capsys.readouterr().out
