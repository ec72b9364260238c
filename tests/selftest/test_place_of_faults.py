"""Planted faults whose first difference was reported at a block other than that of the fault."""

from __future__ import annotations

import pytest

from weft.config.load import load
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.subject import Subject
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.effect import layout_words, write_texts
from weft_selftest.mutants.plant import planted


@pytest.mark.parametrize(
    ("name", "phase", "block", "micro_batch"),
    [
        ("keys_and_values_are_those_of_the_layer_before", "forward", "layer1", 0),
        pytest.param(
            "the_input_gradient_of_a_column_linear_is_not_reduced",
            "backward",
            "head",
            None,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_difference_is_at_the_fault(tmp_path, name, phase, block, micro_batch):
    """All of micro-batch 0 runs forward before micro-batch 1; and where a parameter's gradient is
    not summed over tp, every rank along tp must have all of it.
    """
    write_texts(tmp_path)
    mutant = all_mutants()[name]
    argv = [*layout_words(mutant.layout, tmp_path)]
    run = load(argv, FAMILIES)
    with planted(mutant):
        first = prove(Subject.of(run, steps=1)).first
    assert first is not None
    assert first.phase == phase
    assert first.block == block
    assert first.micro_batch == micro_batch
