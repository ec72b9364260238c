"""Optimizers, and states in 8 bits, on every kind of layout equal the plain rules on one device; bytes sent for matrices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix.layouts import Case
from tests.train.optimizer_layouts import check, sent_for_matrices
from weft.config.schema import OptimConfig

MUON = OptimConfig(name="muon", weight_decay=0.1)
OPTIMS = {
    "muon": MUON,
    "adafactor": OptimConfig(name="adafactor", weight_decay=0.1),
    "lion": OptimConfig(name="lion", weight_decay=0.1),
    "adamw 8bit": OptimConfig(weight_decay=0.1, state_dtype="8bit", state_block=10),
    "muon 8bit": MUON.model_copy(update={"state_dtype": "8bit", "state_block": 10}),
}
SMALL = {"layers": 2, "microbatches": 2}
LAYOUTS = {
    "tp2": Case("tp2", **SMALL),
    "tp2 sp": Case("tp2", sequence=True, **SMALL),
    "pp2": Case("pp2", **SMALL),
    "ep2": Case("ep2", family="qwen3-moe", **SMALL),
    "dp2 zero1": Case("dp2", zero=1, **SMALL),
    "dp2 zero2": Case("dp2", zero=2, **SMALL),
    "dp2 zero3": Case("dp2", zero=3, **SMALL),
    "dp2 tp2 zero3": Case("dp2 tp2", zero=3, **SMALL),
    "pp2 dp2 tp2": Case("pp2 dp2 tp2", **SMALL),
    "cp2": Case("cp2", **SMALL),
    "dp2 ep2 tp2 zero2": Case("dp2 ep2 tp2", family="qwen3-moe", zero=2, **SMALL),
}


QUICK = {
    "muon": tuple(LAYOUTS),
    "adafactor": ("tp2", "ep2", "dp2 zero1", "dp2 tp2 zero3"),
    "lion": ("dp2 tp2 zero3",),
    "adamw 8bit": ("tp2", "pp2", "ep2", "dp2 zero1", "dp2 zero2", "dp2 tp2 zero3"),
    "muon 8bit": ("dp2 tp2 zero3",),
}
"""The others are as exact, and run in `make slow`."""


def every_pair() -> list[Any]:
    pairs = []
    for name in OPTIMS:
        for layout in LAYOUTS:
            if layout in QUICK[name]:
                marks = ()
            else:
                marks = (pytest.mark.slow,)
            pairs.append(pytest.param(layout, name, marks=marks))
    return pairs


@pytest.mark.parametrize(("layout", "name"), every_pair())
def test_layout_updates_as_one_device_does(layout: str, name: str) -> None:
    check(LAYOUTS[layout], OPTIMS[name])


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2 zero1", "dp2 tp2 zero3"])
def test_bytes_sent_for_matrices_are_those_that_the_optimizer_states(layout: str) -> None:
    for sent in sent_for_matrices(LAYOUTS[layout], MUON):
        assert sent.counted == sent.stated
