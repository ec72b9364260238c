"""Mixtures of data sources: the share and the epochs of each source; every layout reads the same samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checkpoint.resume import data_changes
from weft.cli import main
from weft.config.schema import DataConfig
from weft.data.dataset import open_data
from weft.data.mixture import CYCLE, MixtureSampler, make_mixture_sampler, read_mix
from weft.data.order import layout_of
from weft.models.gpt2 import config as gpt2
from weft.train.data_loader import samples_of
from weft.train.event_lines import read_events


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=7), size=st.integers(1, 3 * CYCLE))
def test_every_source_is_within_one_of_its_share_after_any_number_of_samples(weights, size):
    turns = make_mixture_sampler(weights)
    sources, own = turns.at(np.arange(size))
    num_samples = np.arange(1, size + 1)
    for source, share in enumerate(turns.shares):
        is_own = sources == source
        counted = np.cumsum(is_own)
        expected = share * num_samples
        assert np.abs(counted - expected).max() < 1
        total = int(counted[-1])
        assert own[is_own].tolist() == list(range(total))


@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=7))
def test_shares_are_the_weights_to_a_thousandth(weights):
    shares = make_mixture_sampler(weights).shares
    assert sum(shares) == pytest.approx(1)
    total = sum(weights)
    for share, weight in zip(shares, weights, strict=True):
        error = abs(share - weight / total)
        assert error < 1 / CYCLE + 1e-9


def test_the_order_of_sources_is_written_down():
    """A run that is resumed years later must go on with the sources with which it began."""
    mixture_sampler = MixtureSampler((5, 3, 2))
    sources, own = mixture_sampler.at(np.arange(12))
    assert sources.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert own.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1, 5, 3]


def test_weights_are_read_from_words_whatever_the_path():
    assert read_mix(("a=b/c=0.5", "d=2")) == {"a=b/c": 0.5, "d": 2.0}


@pytest.fixture
def mixed(tmp_path):
    """Two sources: 30 samples of the letter a, 9 of b."""
    (tmp_path / "a.txt").write_text("a" * 121)
    (tmp_path / "b.txt").write_text("b" * 37)
    return open_data(
        DataConfig(mix=(f"{tmp_path}/a.txt=3", f"{tmp_path}/b.txt=1"), seq_len=4), gpt2.Config()
    )


def test_each_source_walks_through_its_own_epochs(mixed):
    walk = np.concatenate([samples_of(mixed, step, global_size=12, seed=7) for step in range(12)])
    first = walk[walk < 30]
    second = walk[walk >= 30] - 30
    assert len(first) == 108
    assert len(second) == 36
    for own, size in ((first, 30), (second, 9)):
        epochs = []
        for start in range(0, len(own) - size + 1, size):
            epochs.append(own[start : start + size].tolist())
        for epoch in epochs:
            assert sorted(epoch) == list(range(size))
        assert epochs[0] != epochs[1]


def test_samples_of_several_sources_come_in_the_order_in_which_they_are_asked_for(mixed):
    chosen = samples_of(mixed, 0, global_size=16, seed=7)
    letters = mixed.read(chosen).inputs[:, 0]
    letters_of_chosen = ["a" if number < 30 else "b" for number in chosen]
    assert letters.tolist() == list(map(ord, letters_of_chosen))
    assert (letters == ord("b")).sum() == 4


def test_every_layout_reads_the_same_mixture(mixed):
    chosen = samples_of(mixed, 5, global_size=24, seed=7)
    for degree, micro in ((1, 4), (3, 2), (2, 6)):
        parts = [
            layout_of(chosen, index=index, degree=degree, micro_size=micro)
            for index in range(degree)
        ]
        actual = sorted(np.concatenate([part.ravel() for part in parts]))
        assert actual == sorted(chosen)


def test_exact_shares_are_reported(mixed):
    facts = mixed.facts()
    assert list(facts["shares"].values()) == [0.75, 0.25]
    assert facts["samples"] == 39
    assert facts["tokens"] == 158
    assert "75.0%" in facts["source"]


def test_a_mixture_whose_sources_were_moved_is_the_same_and_one_with_other_weights_is_not(tmp_path):
    texts = {"a": "a" * 121, "b": "b" * 37}

    def facts_of(names, weights):
        words = []
        for text, name, weight in zip(texts.values(), names, weights, strict=True):
            file = tmp_path / f"{name}.txt"
            file.write_text(text)
            words.append(f"{file}={weight}")
        data = DataConfig(mix=tuple(words), seq_len=4)
        facts = open_data(data, gpt2.Config(layers=1)).facts()
        return json.loads(json.dumps(facts, sort_keys=True))  # as a manifest stores them

    stored = facts_of(("a", "b"), (0.75, 0.25))
    moved = facts_of(("z", "c"), (0.75, 0.25))
    assert not list(data_changes(stored, moved))
    (change,) = data_changes(stored, facts_of(("a", "b"), (0.25, 0.75)))
    assert "weights differs" in change.what
    del stored["weights"]  # as earlier versions store it
    assert not list(data_changes(stored, facts_of(("a", "b"), (0.75, 0.25))))
    assert list(data_changes(stored, facts_of(("a", "b"), (0.25, 0.75))))


def test_a_run_that_is_resumed_continues_with_the_same_mixture(tmp_path):
    """Packed documents of two sources, read ahead: four steps at once, and two and two."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(40):
            num_words = 3 + number % 7
            (tmp_path / name / f"{number}.txt").write_text(f"{name}{number} " * num_words)
    model = [
        "--model.layers",
        "1",
        "--model.dim",
        "16",
        "--model.heads",
        "2",
        "--model.kv_heads",
        "2",
        "--model.ffn",
        "16",
    ]
    mix = [
        "--data.mix",
        f"{tmp_path}/a=2",
        f"{tmp_path}/b=1",
        "--data.packing",
        "documents",
        "--data.seq_len",
        "16",
    ]
    words = [
        "train",
        "--transport",
        "threads",
        "--optim.decay",
        "constant",
        "--batch.global_size",
        "4",
        *model,
        *mix,
    ]

    def losses(out):
        return [
            event["loss"]
            for event in read_events(tmp_path / out / "events.jsonl")
            if event["event"] == "step"
        ]

    assert main([*words, "--steps", "4", "--out", f"{tmp_path}/straight"]) == 0
    assert main([*words, "--steps", "2", "--out", f"{tmp_path}/broken", "--save.every", "2"]) == 0
    assert (
        main(
            [
                *words,
                "--steps",
                "4",
                "--out",
                f"{tmp_path}/broken",
                "--resume",
                "auto",
                "--mesh",
                "dp2",
            ]
        )
        == 0
    )
    straight = losses("straight")
    broken = losses("broken")
    assert len(set(straight)) == 4
    assert broken == pytest.approx(straight, rel=1e-5)
