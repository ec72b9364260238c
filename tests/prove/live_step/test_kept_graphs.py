"""Graphs of the plain forward are kept while there is room: the same numbers with all, some and none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_run import MODEL, SEQUENCES
from tests.user_models.deceiving import SOUND
from weft.cli import main
from weft.models import FAMILIES
from weft.prove.live_step import check
from weft.prove.live_step.kept_graphs import KeptGraphs
from weft.prove.live_step.plain_pass import PlainPass


def test_each_kept_storage_is_counted_once():
    x = torch.ones(3, 4, requires_grad=True)
    kept = KeptGraphs(most_bytes=100)
    with kept.count():
        y = (x * x).square()  # keeps x twice, and x * x
    assert kept.num_bytes == 2 * 3 * 4 * 4
    assert kept.has_room
    with kept.count():
        y.square()
    assert not kept.has_room


@pytest.mark.parametrize("most_bytes", [0, 6_000, 10**9])
def test_a_step_is_equal_with_any_room_for_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most_bytes: int
):
    monkeypatch.setattr("weft.start.live_proof.is_proved", lambda run, environ: True)
    monkeypatch.setattr(check, "available_bytes", lambda comm: check.SHARE_OF_GRAPHS * most_bytes)
    monkeypatch.setattr(check, "needed_bytes", lambda *args, **sizes: 0)
    num_calls = []
    call = PlainPass._call
    monkeypatch.setattr(
        PlainPass, "_call", lambda self, *args: num_calls.append(1) or call(self, *args)
    )
    words = ["--mesh", "dp2", "--transport", "threads", "--batch.global_size", "4"]
    out = ["--steps", "1", "--out", str(tmp_path / "run")]
    assert main(["train", *MODEL, *SEQUENCES, *words, *out]) == 0
    (verdict,) = [
        event
        for event in map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
        if event["event"] == "proof"
    ]
    assert verdict["verdict"] == "equal"
    num_blocks, num_passes = 5, 2  # two sequences on each rank at once
    all_once, all_twice = num_blocks * num_passes, 2 * num_blocks * num_passes
    expected = {0: all_twice, 10**9: all_once}.get(most_bytes)
    assert len(num_calls) == expected or (
        expected is None and all_once < len(num_calls) < all_twice
    )


@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_a_block_that_recomputes_parts_in_its_backward_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mesh: str
):
    """Under tp in passes with noise, too, which the repeated forward must have as well."""
    monkeypatch.setattr("weft.start.live_proof.is_proved", lambda run, environ: True)
    plain = "x = x + self.out(self.attend(q, k, v, batch).flatten(2))"
    recomputed = plain.replace("self.out(", "checkpoint(self.out, ").replace(
        "flatten(2))", "flatten(2), use_reentrant=False)"
    )
    model = tmp_path / "recomputing.py"
    text = SOUND.replace(plain, recomputed)
    model.write_text(f"from torch.utils.checkpoint import checkpoint\n{text}")
    words = ["--mesh", mesh, "--transport", "threads", "--batch.global_size", "4"]
    out = ["--steps", "1", "--data.seq_len", "16", "--out", str(tmp_path / "run")]
    with FAMILIES.restored():
        assert main(["train", str(model), *words, *out]) == 0
    (verdict,) = [
        event
        for event in map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
        if event["event"] == "proof"
    ]
    assert verdict["verdict"] == "equal"
