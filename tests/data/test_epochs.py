"""Epochs of a run: how often each source is read, told before the start and once where a source is read again."""

from __future__ import annotations

import json

import pytest

from tests.tiny_run import MODEL, SEQUENCES, write_text
from weft.cli import main
from weft.config.schema import DataConfig
from weft.data.dataset import open_data
from weft.data.epochs import DataSummary, source_epochs
from weft.models.gpt2 import config as gpt2
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

CONFIG = gpt2.Config(vocab=256)


def test_each_source_of_a_mixture_has_its_own_epochs(tmp_path):
    for name, size in (("a.txt", 161), ("b.txt", 1601)):
        (tmp_path / name).write_text("x" * size)
    mix = tuple(f"{tmp_path}/{name}=0.5" for name in ("a.txt", "b.txt"))
    samples = open_data(DataConfig(mix=mix, seq_len=16), CONFIG)
    first, second = source_epochs(samples, num_read=40)
    assert (first.num_samples, first.epochs) == (10, 2.0)
    assert (second.num_samples, second.epochs) == (100, 0.2)
    assert first.note(10).endswith("10 samples, of which step 6 of 10 begins the second epoch")


def test_the_step_that_begins_the_second_epoch_is_the_first_that_reads_a_sample_again(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 161)
    samples = open_data(DataConfig(source=f"{tmp_path}/a.txt", seq_len=16), CONFIG)
    for batch, step in ((5, 3), (4, 3), (3, 4), (10, 2)):
        (source,) = source_epochs(samples, num_read=9 * batch)
        assert f"step {step} of 9 begins" in source.note(9)


def test_data_that_cannot_be_opened_are_one_line_of_explain():
    summary = DataSummary.of(DataConfig(source="nowhere"), CONFIG, num_read=1)
    assert summary.text.startswith("data: cannot be opened: data.source: no such file or folder")


@pytest.mark.parametrize(("steps", "is_read_again"), [("3", False), ("1000", True)])
def test_explain_and_a_run_tell_the_epochs(tmp_path, capsys, steps, is_read_again):
    source = ("--data.source", str(write_text(tmp_path)), *MODEL, *SEQUENCES)
    assert main(["explain", *source, "--steps", steps, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["tokens"] == 18_000
    (epochs,) = data["epochs"]
    assert epochs["num_samples"] == 2249
    assert (epochs["num_read"] > epochs["num_samples"]) == is_read_again
    assert data["opened_s"] > 0


def test_a_run_that_reads_its_data_again_has_one_note(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 4)
    words = [*MODEL, *SEQUENCES, "--data.source", str(tmp_path / "text.txt"), "--steps", "3"]
    words += ["--batch.global_size", "4", "--transport", "threads", "--prove.before", "never"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "3 steps are 1.3 epochs" in out
    (note,) = [
        each for each in read_events(tmp_path / "run" / EVENTS) if each.get("kind") == "epochs"
    ]
    assert note["text"].endswith("9 samples, of which step 3 of 3 begins the second epoch")
    assert note["text"] in out
