"""Runs made from runs: reduced sizes, smaller cases, and the keys that differ."""

from __future__ import annotations

import shlex

from weft.config.changed_runs import changes, with_degree
from weft.config.load import load
from weft.config.run import Run
from weft.config.small_runs import reduced
from weft.config.smaller_cases import reductions
from weft.models import FAMILIES


def run_of(words: str) -> Run:
    return load(shlex.split(words), FAMILIES)


def test_a_model_that_takes_no_other_sizes_keeps_its_own() -> None:
    run = run_of("--mesh tp2 --model.layers 5")
    smaller = reduced(run, lambda model, _: model.architecture["layers"] >= 5)
    assert smaller.model == run.model
    assert smaller.steps < run.steps
    assert reduced(run, lambda *_: True).model.architecture["layers"] == 3


def test_another_degree_keeps_the_number_of_micro_batches() -> None:
    run = run_of("--mesh 'dp4 tp2' --batch.global_size 16 --batch.micro_size 2")
    smaller = with_degree(run, "dp", 1)
    assert smaller.mesh == "tp2"
    assert smaller.num_micro == run.num_micro
    assert changes(run, smaller) == {
        "mesh": ("dp4 tp2", "tp2"),
        "batch.global_size": ("16", "4"),
    }


def test_every_reduction_makes_another_run_the_smallest_first() -> None:
    run = run_of("--mesh 'dp4 tp2' --model.layers 3 --parallel.zero 1")
    found = []
    for reduction in reductions(run, lambda *_: True):
        for smaller in reduction(run):
            assert smaller != run
            found.append(smaller)
    assert [each.mesh for each in found[:3]] == ["tp2", "dp2 tp2", "dp4"]
    assert 0 in [each.parallel.zero for each in found]
    assert 1 in [each.model.architecture["layers"] for each in found]
