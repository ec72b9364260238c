"""docs/support.md: its rejections are the messages of config validation, its counts are those of the results."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from tests.matrix.layouts import Case
from tests.matrix.support import (
    FEATURES,
    PAGE,
    REJECTED,
    REJECTIONS,
    Result,
    messages,
    page,
    read_results,
    rejections,
)
from weft.config.load import try_load
from weft.config.rules.config_checks import config_checks
from weft.models import FAMILIES


def test_rejections_of_the_page_are_those_of_validation() -> None:
    _, _, after = PAGE.read_text(encoding="utf-8").partition(REJECTIONS)
    assert (REJECTIONS + after).splitlines() == "\n".join(rejections()).splitlines(), (
        "run `make support`"
    )


def test_every_check_rejects_a_layout_of_the_page() -> None:
    runs = [try_load(shlex.split(words), FAMILIES).run for words in REJECTED]
    idle = []
    for same_rule in zip(*map(config_checks, runs), strict=True):
        is_of_layout = same_rule[0].suggest is not None
        if is_of_layout and not any(check.fails() for check in same_rule):
            idle.append(same_rule[0].find)
    assert not idle, f"add a command to REJECTED for each of {idle}"
    for words in REJECTED:
        assert messages(shlex.split(words))


def test_the_last_result_of_a_layout_counts(tmp_path: Path) -> None:
    case = Case("dp2", zero=1)
    other = Case("tp2", sequence=True)
    lines = [
        {"outcome": "failed", "case": asdict(case), "commit": "a"},
        {
            "outcome": "passed",
            "case": asdict(other),
            "commit": "a",
            "relative": 2e-13,
            "compared": 5,
        },
        {
            "outcome": "passed",
            "case": asdict(case),
            "commit": "b",
            "relative": 3e-12,
            "compared": 7,
        },
    ]
    file = tmp_path / "results.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")
    results = read_results(file)
    result = Result(case, True, "b", 3e-12, 7)
    assert results == (result, Result(other, True, "a", 2e-13, 5))
    text = page(results)
    assert "2 were run (at a, b) and 2 passed" in text
    assert "12 numbers and tensors were compared" in text
    assert "| zero 1 | 1 | 0 | 3e-12 |" in text
    assert "| sp | 1 | 0 | 2e-13 |" in text


def test_a_layout_that_failed_is_named() -> None:
    result = Result(Case("dp2", zero=1), False, "a")
    text = page([result])
    assert f"- FAILED: {Case('dp2', zero=1)}" in text
    assert "| zero 1 | 0 | 1 |  |" in text


def test_features_distinguish_cases() -> None:
    case = Case(
        "tp2 cp2", context="ulysses", documents=True, schedule="zbv", chunks=2, recompute="full"
    )
    has = {name for name, feature in FEATURES.items() if feature(case)}
    assert has == {
        "llama3",
        "zbv",
        "cp",
        "tp",
        "full",
        "ulysses",
        "docs",
        "accumulation",
        "other nesting",
    }
