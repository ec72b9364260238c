"""Public programs of other people: the chain computes their own loss; a layout equals one device or is rejected."""

from __future__ import annotations

import pytest

from tests.programs_of_others.outcomes import LAYOUTS, PROGRAMS, TOLERANCE, outcome, own_difference
from tests.programs_of_others.page import PAGE, counts_of

MIXES = "mixes tokens outside of Attend"
ARRAYS = "reads arrays"
FAILS = "its forward fails on a rank's shards"
REJECTED = {
    ("mingpt", "cp2"): MIXES,
    ("mamba_minimal", "cp2"): MIXES,
    ("word_language_model_transformer", "cp2"): MIXES,
    ("x_transformers", "cp2"): "without a position for each token",
    ("mingpt", "tp2 sequence"): FAILS,
    ("x_transformers", "tp2 sequence"): "cat of a sharded dim and a whole one",
    ("word_language_model_transformer", "tp2 sequence"): "add of a sharded dim with a whole one",
    ("dit", "cp2"): ARRAYS,
    ("dit", "tp2 sequence"): ARRAYS,
}
"""(program, column) -> part of the line; of the quick test."""
ALWAYS = (
    ("nanogpt", "tp2 sequence"),
    ("mingpt", "tp2"),
    ("nanochat", "cp2"),
    ("mamba_minimal", "pp2 zero_bubble"),
    ("resnet", "dp2 zero 3"),
    ("whisper", "tp2"),
    ("t5", "pp2 zero_bubble"),
    (
        "bert",
        "dp2 zero 3",
    ),  # its loss is a mean over each sequence, which the trial took for no sum
    ("diffusion_unet", "dp2 zero 3"),
    ("x_transformers", "generation"),  # two tokens of memory stand before the text
)
"""Cases that run by default; `make slow` runs all."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_chain_computes_the_program_s_own_loss_and_gradients(name: str) -> None:
    assert own_difference(name) <= TOLERANCE


@pytest.mark.parametrize("name", ["mingpt", "vit_timm", "whisper", "convnext"])
def test_the_chain_computes_them_with_other_settings(name: str) -> None:
    assert own_difference(name, **PROGRAMS[name].varied) <= TOLERANCE


def test_a_chain_that_computes_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.programs_of_others import vit_lucidrains

    monkeypatch.setattr(vit_lucidrains.Layer, "forward", lambda self, x: self.ff(self.attn(x)) + x)
    assert own_difference("vit_lucidrains") > 0.01


@pytest.mark.parametrize(("name", "layout"), ALWAYS)
def test_some_programs_equal_one_device(name: str, layout: str) -> None:
    found = outcome(name, layout)
    assert found.word == "equal", found.text
    assert float(found.text) <= TOLERANCE


@pytest.mark.parametrize(("name", "layout"), REJECTED)
def test_a_program_is_rejected_in_one_line(name: str, layout: str) -> None:
    found = outcome(name, layout)
    assert found.word == "rejected", found.text
    assert REJECTED[name, layout] in found.text
    assert "\n" not in found.text


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_equal_or_rejected(name: str, layout: str) -> None:
    found = outcome(name, layout)
    assert found.word in ("equal", "rejected", "none"), found.text
    if found.word == "equal" and layout != "dp2 bfloat16":
        assert float(found.text) <= TOLERANCE


def test_the_page_has_the_lines_of_the_programs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, program in PROGRAMS.items():
        lines, changed, below = counts_of(name)
        assert f"| {program.title} | {lines} | {changed} | {below} |" in text
