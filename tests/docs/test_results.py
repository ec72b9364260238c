"""The results page says what the kept figures say, and these are of the runs that `make results` trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import results, results_page
from benchmarks.results import RESULTS
from benchmarks.results_page import FOLDER, PAGE, page_with_tables, read

ROOT = PAGE.parents[1]
TOLERANCE = 1e-9
MOST_BYTES = 1_000_000


def evaluations(name: str, label: str) -> dict[int, float]:
    """Step -> loss."""
    (run,) = [run for run in read(name)["runs"] if run["label"] == label]
    return dict(run["evaluations"])


def test_tables_of_the_page_have_the_kept_figures() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page) == page
    assert all(f"| {run['label']}" in page for name in RESULTS for run in read(name)["runs"])


@pytest.mark.parametrize("name", RESULTS)
def test_kept_figures_are_of_the_runs_of_the_benchmark(name: str) -> None:
    kept = read(name)
    assert kept["words"] == RESULTS[name].words
    assert {run["label"]: run["words"] for run in kept["runs"]} == RESULTS[name].runs
    assert all(set(run["proof"]) == {"equal"} for run in kept["runs"] if run["ranks"] > 1)


@pytest.mark.parametrize("name", RESULTS)
def test_kept_pages_are_small_and_name_no_folder_of_a_machine(name: str) -> None:
    page = (FOLDER / f"{name}.html").read_text(encoding="utf-8")
    assert len(page.encode()) < MOST_BYTES
    assert "/work/" not in page
    assert "/home/" not in page


def test_what_the_page_claims_holds() -> None:
    assert min(evaluations("shakespeare", "one").values()) < 1.9
    muon, adamw = evaluations("speedrun", "muon one"), evaluations("speedrun", "adamw one")
    assert muon[100] < adamw[160]
    for run in read("mnist")["runs"]:
        if run["label"] == "float32 dp4":
            assert run["largest_difference"] == 0
        if run["label"].startswith("float64"):
            assert run["largest_difference"] < 1e-13
    assert min(evaluations("dpo", "one").values()) < 0.6931


@pytest.mark.slow
def test_the_smallest_result_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(results, "RUNS", tmp_path)
    label = "float64 dp4"
    results.train("mnist", label)
    (kept,) = [run for run in results_page.read("mnist")["runs"] if run["label"] == label]
    only = results.RESULTS["mnist"]
    monkeypatch.setitem(
        vars(results),
        "RESULTS",
        {"mnist": results.Result(only.title, only.words, {label: only.runs[label]}, {})},
    )
    (found,) = results.figures("mnist")["runs"]
    assert found["last_loss"] == pytest.approx(kept["last_loss"], rel=TOLERANCE)
    for (step, loss), (kept_step, kept_loss) in zip(
        found["evaluations"], kept["evaluations"], strict=True
    ):
        assert (step, loss) == (kept_step, pytest.approx(kept_loss, rel=TOLERANCE))
    assert found["accuracy"] == kept["accuracy"]
