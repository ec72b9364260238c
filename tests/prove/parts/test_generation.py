"""The proof of generation: caches of healthy models hold, and planted faults of caches and masks are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.generate.test_mutants import MUTANTS
from tests.prove.faults import small_run
from weft.generate.cache import DecodeBatch
from weft.prove.parts.generation import generation_passes
from weft.prove.parts.part_proof import Outcome
from weft.prove.parts.prompts import BLOCK_CELLS, prompts_of
from weft.prove.report import Difference
from weft.prove.subject import Subject
from weft.run.run_ranks import arithmetic_of_ranks
from weft_selftest.mutants.plant import replaced

OF_THE_TEST_ITSELF = "ranks_draw_at_different_places"
"""A mutant of the function that the other test generates with."""


def outcome_of(words: str) -> Outcome:
    """The proof of generation of a run at reduced size."""
    found = Outcome()
    with arithmetic_of_ranks():
        found.take(generation_passes(Subject.of(small_run(words), steps=2)))
    return found


def first_difference(words: str) -> Difference:
    found = outcome_of(words)
    differences = found.passes[-1].differences
    assert differences, "the fault is reported"
    return differences[0]


def test_prompts_differ_in_length_and_end_one_after_the_other() -> None:
    found = prompts_of(range(50), most_positions=None, is_long=True)
    assert len({len(each.tokens) for each in found}) == len(found)
    assert len({each.num_new for each in found}) > 2
    longest = found[-1]
    assert len(longest.tokens) < BLOCK_CELLS < len(longest.tokens) + longest.num_new


def test_prompts_keep_to_the_positions_that_a_model_has_learned() -> None:
    for each in prompts_of([1, 2], most_positions=5, is_long=False):
        assert len(each.tokens) >= 1
        assert len(each.tokens) + each.num_new <= 5


def test_generation_of_a_windowed_model_on_a_layout_is_equal() -> None:
    found = outcome_of("--model.name mistral --mesh 'dp2 tp2' --parallel.sequence True")
    assert found.is_equal, found.error or [str(each) for each in found.passes[-1].differences]
    assert [each.dtype for each in found.passes] == [
        "float64, texts after training, on dp2 tp2",
        "float64, texts from a checkpoint, on tp2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--mesh 'pp2 cp2 tp2'",
        "--mesh ep2 --model.name deepseek --model.mtp_depth 1",
        "--mesh dp2 --lora.rank 2 --data.packing documents",
        "--mesh pp2 --model.name gemma3 --data.packing documents",
        "--mesh tp2 --model.name gpt2 --precision.compute bfloat16",
    ],
)
def test_generation_is_equal(words: str) -> None:
    found = outcome_of(words)
    assert found.is_equal, found.error or [str(each) for each in found.passes[-1].differences]


def is_behind_the_prompt(batch: DecodeBatch) -> bool:
    return batch.start != 0


def test_keys_that_are_written_one_position_late_are_found() -> None:
    def late(right: Callable[..., Tensor], cells: Any, new: Tensor, batch: DecodeBatch) -> Tensor:
        if is_behind_the_prompt(batch):
            assert batch.cells is not None
            firsts = tuple(first + 1 for first in batch.first_positions)
            batch = replace(batch, cells=batch.cells + 1, first_positions=firsts)
        return right(cells, new, batch)

    with replaced("weft.generate.cache:_put", late):
        first = first_difference("--mesh dp2")
    assert (first.phase, first.block) == ("generation", "layer0")
    assert first.tensor == "layer0.output of prompt 0 of 1 tokens, token 1 after it"


def test_rows_of_different_lengths_without_a_mask_are_found() -> None:
    """What lies behind a shorter prompt is read as if it were text."""

    def unmasked(right: Callable[..., Any], self: DecodeBatch, mask: Any) -> Tensor | None:
        return None if is_behind_the_prompt(self) else right(self, mask)

    with replaced("weft.generate.cache:DecodeBatch.visible_cells", unmasked):
        first = first_difference("--mesh tp2")
    assert first.tensor == "layer0.output of prompt 0 of 1 tokens, token 1 after it"
    assert (first.axis, first.ranks) == ("tp", (0,))


OWN_MODELS = Path(__file__).parents[2] / "user_models"


@pytest.mark.parametrize(
    "name",
    [
        "torch_attention",
        "two_streams",
        pytest.param("torch_encoder", marks=pytest.mark.slow),
        pytest.param("scan", marks=pytest.mark.slow),
        pytest.param("head_bias", marks=pytest.mark.slow),
    ],
)
def test_a_model_without_caches_reads_whole_texts(name: str) -> None:
    """Its own modules mix positions, or see what a shorter row is filled up with; the last block of
    one is no `head`; the stages of one hand on two tensors.
    """
    found = outcome_of(f"--model.name {OWN_MODELS / name}.py --mesh pp2")
    assert found.is_equal, found.error or [str(each) for each in found.passes[-1].differences]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTANTS if name != OF_THE_TEST_ITSELF])
def test_mutants_of_caches_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, mesh, change = MUTANTS[name]
    words = f"--model.name {family} --mesh '{mesh}'"
    change(monkeypatch)
    found = outcome_of(words)
    assert not found.is_equal
