"""The proof before the first step of a run: cached, recorded, and the run does not start where it fails."""

from __future__ import annotations

import json

import pytest

from tests.tiny_run import TINY
from weft.cli import main
from weft.parallel.zero import grad_norm


@pytest.fixture
def words(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_PROVE_BEFORE", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ["train", *TINY, "--mesh", "dp2", "--steps", "1", "--out"]


def event(out, kind):
    lines = (out / "events.jsonl").read_text().splitlines()
    events = map(json.loads, lines)
    return next(event for event in events if event["event"] == kind)


def test_a_verdict_is_recorded_and_kept(words, tmp_path):
    assert main([*words, str(tmp_path / "a")]) == 0
    assert main([*words, str(tmp_path / "b")]) == 0
    assert event(tmp_path / "a", "proof")["source"] == "proved"
    assert event(tmp_path / "b", "proof")["source"] == "cache"
    manifest = json.loads((tmp_path / "a/ckpt/step-000001/manifest.json").read_text())
    text = json.dumps(manifest)
    assert '"verdict": "equal"' in text
    (tmp_path / "other.txt").write_text("other rows " * 200)
    assert main([*words, str(tmp_path / "c"), "--data.source", str(tmp_path / "other.txt")]) == 0
    assert event(tmp_path / "c", "proof")["source"] == "proved"


@pytest.mark.slow
def test_a_run_whose_proof_fails_does_not_start(words, tmp_path, monkeypatch, capsys):
    right = grad_norm.clip

    def clip(reducer, norm, *, most, scale=1.0):
        right(reducer, norm * 2, most=most, scale=scale)

    monkeypatch.setattr(grad_norm, "clip", clip)
    assert main([*words, str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "clip of step 1: clip factor is" in error
    assert "weft prove --full --first 1" in error
    assert not (tmp_path / "run").exists()


def test_never_proves_nothing(words, tmp_path):
    assert main([*words, str(tmp_path / "run"), "--prove.before", "never"]) == 0
    assert '"event":"proof"' not in (tmp_path / "run/events.jsonl").read_text()
