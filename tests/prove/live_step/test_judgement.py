"""The judgement of a live step: pure tables in, differences in the order of execution out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from weft.prove.arithmetic import NumberTypes
from weft.prove.live_step.compared_numbers import GradientRow, OutputRow, StepNumbers
from weft.prove.live_step.judgement import Judgement
from weft.prove.live_step.owner_gradients import GradientNoise
from weft.prove.live_step.units import num_units, units_of_rank

FLOAT64 = NumberTypes(torch.float64, torch.float64, torch.float64)
FLOAT32 = NumberTypes(torch.float32, torch.float32, torch.float32)
BFLOAT16 = NumberTypes(torch.float32, torch.bfloat16, torch.float32)
BLOCKS = ("embed", "layer0", "layer1", "head")


def gradient(parameter, *, difference=0.0, spread=0.0, largest=1.0, projection=1.0):
    noise = GradientNoise(largest=spread, length=10 * spread, along=spread)
    products = (4.0 * projection, 4.0)
    return GradientRow(parameter, 100, difference, largest, noise, products, squared_norm=4.0)


def judgement(types=FLOAT64, **changes):
    numbers = StepNumbers(loss=5.0, norm=2.0, targets=32)
    plain = Judgement(
        blocks=BLOCKS,
        types=types,
        layout=numbers,
        plain=numbers,
        unlike_definition=(),
        unequal=(),
        outputs=tuple(OutputRow(name, row, 1.0, 1.0, 10.0) for name in BLOCKS for row in (0, 1)),
        gradients=(gradient("head.proj.weight"), gradient("layer0.attn.q.weight")),
        output_spread=dict.fromkeys(BLOCKS, 0.0),
        loss_spread=0.0,
        num_units=4,
    )
    return replace(plain, **changes)


def test_equal_tables_have_no_difference():
    assert judgement().differences == ()
    assert judgement().notes == ()


def test_the_first_difference_is_that_of_the_first_block():
    outputs = [
        OutputRow(name, row, 1.0 + (row == 1 and name != "embed"), 1.0, 10.0)
        for name in BLOCKS
        for row in (0, 1)
    ]
    found = judgement(
        outputs=outputs,
        gradients=(gradient("head.proj.weight", difference=0.5),),
        layout=StepNumbers(loss=5.1, norm=2.0, targets=32),
    ).differences
    assert found[0].block == "layer0"
    assert found[0].relation == "different in 1 of 2 sequences of the step (1)"
    assert [each.phase for each in found] == ["forward"] * 3 + ["loss", "reduce"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_a_difference(bad):
    found = judgement(BFLOAT16, gradients=(gradient("head.proj.weight", difference=bad),))
    assert [each.parameter for each in found.differences] == ["head.proj.weight"]
    outputs = (OutputRow("layer1", 0, bad, 1.0, 10.0),)
    assert [each.block for each in judgement(outputs=outputs).differences] == ["layer1"]


def test_numbers_of_targets_are_exact():
    found = judgement(BFLOAT16, layout=StepNumbers(loss=5.0, norm=2.0, targets=33)).differences
    assert [each.tensor for each in found] == ["number of targets"]


def test_noise_of_one_part_allows_the_root_of_their_number():
    row = gradient("head.proj.weight", difference=8 * 2 * 1e-3 * 0.99, spread=1e-3)
    assert judgement(FLOAT32, gradients=(row,)).differences == ()
    too_much = replace(row, difference=8 * 2 * 1e-3 * 1.01)
    assert judgement(FLOAT32, gradients=(too_much,)).differences


def test_a_gradient_of_rounding_errors_is_measured_by_the_others():
    rows = (gradient("head.proj.weight"), gradient("layer0.attn.k.bias", largest=1e-17))
    rows = (rows[0], replace(rows[1], difference=2e-17))
    assert judgement(gradients=rows).differences == ()


def test_wide_bounds_are_named():
    rows = (gradient("head.proj.weight", spread=0.01),)
    (note,) = judgement(BFLOAT16, gradients=rows).notes
    assert note.startswith("not counted: 1 gradients with bounds above 1%")


def test_a_token_that_rounding_routes_elsewhere_ends_the_comparison():
    right = StepNumbers(5.0, 2.0, 32, {"layer1": (10, 22)})
    moved = StepNumbers(5.5, 2.0, 32, {"layer1": (11, 21)})
    outputs = [OutputRow(name, 0, 1.0 + (name == "head"), 1.0, 10.0) for name in BLOCKS]
    rounded = judgement(BFLOAT16, layout=moved, plain=right, outputs=outputs)
    assert rounded.differences == ()
    assert "what follows layer1" in rounded.notes[0]
    before = [OutputRow("layer0", 0, 2.0, 1.0, 10.0)]
    assert judgement(BFLOAT16, layout=moved, plain=right, outputs=before).differences
    assert (
        judgement(FLOAT64, layout=moved, plain=right).differences[0].tensor == "layer1.expert load"
    )


@pytest.mark.parametrize(
    ("world", "global_size", "micro"), [(1, 4, 1), (3, 8, 2), (8, 4, 4), (4, 9, 3)]
)
def test_units_cover_every_sequence_once(world, global_size, micro):
    sizes = {"global_size": global_size, "micro_size": micro}
    units = [units_of_rank(rank, world, **sizes, is_perturbed=True) for rank in range(world)]
    rows = sorted(row for of_rank in units for unit in of_rank for row in unit.rows)
    assert rows == list(range(global_size))
    assert sum(len(of_rank) for of_rank in units) == num_units(**sizes)
    assert max(map(len, units)) - min(map(len, units)) <= 1


@pytest.mark.parametrize(("world", "global_size", "micro"), [(1, 2, 2), (1, 8, 2), (2, 8, 1)])
def test_joined_units_are_as_large_as_no_micro_batch(world, global_size, micro):
    """A model in which sequences depend on those beside them computes something else in them."""
    sizes = {"global_size": global_size, "micro_size": micro}
    units = [
        unit
        for rank in range(world)
        for unit in units_of_rank(rank, world, **sizes, is_perturbed=False, most_rows=4)
    ]
    assert sorted(row for unit in units for row in unit.rows) == list(range(global_size))
    assert {len(unit.rows) for unit in units} == ({1} if global_size == micro else {4})


def test_without_noise_rounding_of_the_sums_alone_is_allowed():
    eps = FLOAT32.eps
    bound = (4 + 2 + 0.25 * 4) * eps  # four units and sixteen tokens
    row = gradient("head.proj.weight", difference=0.99 * bound)
    assert judgement(FLOAT32, gradients=(row,), num_terms=16).differences == ()
    too_much = (replace(row, difference=1.01 * bound),)
    assert judgement(FLOAT32, gradients=too_much, num_terms=16).differences
    zero = gradient("layer0.attn.k.bias", largest=1e-9, difference=1e-9)
    assert judgement(FLOAT32, gradients=(row, zero), num_terms=16).differences == ()
    assert judgement(
        FLOAT32, gradients=(row, replace(zero, difference=2e-9)), num_terms=16
    ).differences


def test_in_16_bits_a_gradient_is_compared_as_a_whole():
    """Its entries may differ by 16% here; all of them together by less than a hundredth."""
    row = gradient("head.proj.weight", spread=0.01)
    row = replace(row, num_entries=10_000, noise=GradientNoise(0.01, 0.1, 1e-4))
    halved = replace(row, products=(2.0, 4.0))
    assert judgement(BFLOAT16, gradients=(row,)).projected == ("head.proj.weight",)
    assert judgement(BFLOAT16, gradients=(row,)).notes == ()
    off = replace(row, products=(4.01, 4.0))
    closest = 0.0025 / judgement(BFLOAT16, gradients=(off,)).projection_bound(off)
    assert judgement(BFLOAT16, gradients=(off,)).closest == pytest.approx(closest)
    (found,) = judgement(BFLOAT16, gradients=(halved,)).differences
    assert found.relation == "0.5 times the right one along it"
    assert judgement(BFLOAT16, gradients=(replace(row, products=(4.01, 4.0)),)).differences == ()


def test_where_entries_are_compared_their_projection_is_not():
    """A few numbers of noise say little about the projection of a small gradient: one of 144 entries
    in float32 was 6e-8 off, beyond three times what two micro-batches had shown.
    """
    row = replace(
        gradient("layer1.mlp.gate.lora_b.weight", spread=1e-7), products=(4.0 + 2e-6, 4.0)
    )
    assert judgement(FLOAT32, gradients=(row,)).differences == ()
    assert judgement(FLOAT32, gradients=(row,)).projected == ()
    (found,) = judgement(FLOAT32, gradients=(replace(row, difference=2e-3),)).differences
    assert found.relation == "different by 0.002 of its largest entry"


def test_sequences_that_never_reach_a_block_are_named():
    outputs = [
        OutputRow(name, row, None if name == "layer1" and row == 1 else 1.0, 1.0, 10.0)
        for name in BLOCKS
        for row in (0, 1)
    ]
    (found,) = judgement(outputs=outputs).differences
    assert found.block == "layer1"
    assert found.relation == "missing in 1 of 2 sequences of the step (1)"


def test_gradients_of_routers_are_compared_where_rounding_exchanges_no_tokens():
    """Two tokens that change places between experts leave the loads as they are."""
    row = replace(gradient("layer1.mlp.router.proj.weight", difference=0.5), is_router=True)
    assert judgement(FLOAT32, gradients=(row,)).differences
    rounded = judgement(BFLOAT16, gradients=(row,))
    assert rounded.differences == ()
    assert list(rounded.unseen) == [row.parameter], "it does not count as compared"
