"""Three spoiled runs, answered from the page alone: a slow rank, axes in a bad order, a spike of the loss."""

from __future__ import annotations

import html
import re
import socket
from pathlib import Path

import pytest

from tests.commands.test_runs import write_run
from tests.report.test_report import add_events
from tests.spoiled_runs import bad_batch, run_of, spoil, words_of, write_text
from weft.cli import main
from weft.core.mesh import Mesh
from weft.core.node_placement import NodePlacement
from weft.errors import EXIT_OK
from weft.layout.mesh_order import order_problem
from weft.report.page import report_page
from weft.report.recorded_values import RunRecord
from weft.train import straggler
from weft.train.straggler import WINDOW, StragglerWatch

CARD = re.compile(r'<div class="card (\w+)">\s*<h3>(.*?)</h3>(.*?)</div>', re.DOTALL)
RIGHT, FIT, FAST = "Is it right?", "Does it fit?", "How fast is it?"


def cards_of(page: str) -> dict[str, tuple[str, str]]:
    """Question -> kind and text of its card, as a reader sees it."""
    found = {}
    for kind, question, content in CARD.findall(page):
        text = html.unescape(re.sub(r"<[^>]*>", " ", content))
        found[question] = (kind, " ".join(text.split()))
    return found


def page_of(folder: Path) -> dict[str, tuple[str, str]]:
    return cards_of((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_REPORT", raising=False)


def test_a_spike_of_the_loss_is_named_with_its_step_and_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    bad = bad_batch(run_of(text))
    spoil(monkeypatch, "loss", 100.0)
    keys = ["--guard.spike", "3", "--mesh", "dp2", "--steps", str(bad + 2)]
    assert main(["train", *words_of(text, out, *keys)]) == EXIT_OK
    found = page_of(out)
    assert found[FIT][0] == "good"
    kind, answer = found[RIGHT]
    assert kind == "bad"
    assert "; 1 finding of guards" in answer
    assert re.search(rf"guard: step {bad + 1}: the loss is .*samples? \d", answer)


def test_a_slow_rank_is_named_with_how_much_it_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its busy time is given: on a busy machine every rank is slow now and then."""
    monkeypatch.setattr(straggler, "num_cores", lambda: 8)
    monkeypatch.setattr(
        StragglerWatch, "_busy_since_last", lambda watch: 0.1 if watch.comm.rank == 1 else 0.02
    )
    text, out = write_text(tmp_path), tmp_path / "run"
    keys = ["--steps", str(3 * WINDOW), "--mesh", "dp2", "--batch.global_size", "2"]
    assert main(["train", *words_of(text, out, *keys)]) == EXIT_OK
    found = page_of(out)
    assert found[FIT][0] == "good"
    kind, answer = found[FAST]
    assert kind == "bad"
    assert (
        f"rank 1 (dp1) on {socket.gethostname()} is slow: it works 100 ms a step, 5.0 times"
        in answer
    )


@pytest.mark.parametrize("event", ["run", "prediction"])
def test_axes_in_a_bad_order_are_named_with_a_better_one(event: str, tmp_path: Path) -> None:
    problem = order_problem(Mesh.parse("tp2 dp8"), NodePlacement.even(16, 8))
    folder = write_run(tmp_path / "one", [2.0, 1.0, 1.0], mesh="tp2 dp8")
    start = {"event": "run", "layout": "tp2 dp8", "start_step": 3}
    step = {"event": "step", "loss": 1.0, "grad_norm": 1.0, "tokens": 1, "step_s": 1.0}
    named = {**(start if event == "run" else {}), "event": event, "mesh_order": problem}
    add_events(folder, start, named, *({**step, "step": at} for at in (4, 5, 6)))
    kind, answer = cards_of(report_page([RunRecord.read(folder)]))[FAST]
    assert kind == "bad"
    assert problem in answer
