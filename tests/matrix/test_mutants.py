"""A proof reports planted faults, with their block and axis; planting changes nothing for longer than its `with` block.

The faults are data: `weft_selftest.mutants`. Each is planted in a user's run (a published model, its
vocabulary and context), and proved as `weft prove` proves that: at reduced size. docs/proofs.md
lists what weft says of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.comm.comm import Comm
from weft.config.load import load
from weft.config.rules.config_checks import config_checks
from weft.models import FAMILIES
from weft.testing import run_ranks
from weft.train.step import TrainStep
from weft_selftest.commands.prove_mutants import mismatched_types
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.changes import nothing, returns
from weft_selftest.mutants.effect import user_words, write_texts
from weft_selftest.mutants.fault import (
    CollectiveChange,
    CollectiveFault,
    FunctionFault,
    Mutant,
    MutantLayout,
)
from weft_selftest.mutants.names import mutant_names
from weft_selftest.mutants.plant import planted
from weft_selftest.mutants.sightings import seen_by_types, seen_in_first_step
from weft_selftest.mutants.trial import MutantTrials

MUTANTS = all_mutants()
REPRESENTATIVE = ("targets_are_shifted_twice", "moments_are_swapped_in_the_checkpoint")
"""Of one layout, whose healthy run they share; tests/prove plants faults in smaller runs."""
MORE_REPRESENTATIVE = (
    "the_vocabulary_is_cut_as_if_tp_divided_it",
    "positions_do_not_restart_in_documents",
    "float16_gradients_are_not_divided_by_the_loss_scale",
    "gradients_are_averaged_although_the_loss_is_normalised_globally",
    "tied_embeddings_are_not_summed_across_stages",
    "the_weight_gradient_of_a_chunk_is_lost",
    "a_chunk_of_losses_is_not_summed_over_tp",
    "masked_targets_count_in_chunks",
)
"""With the former, one of each kind: the data, a number type, a checkpoint, a collective, a function."""
SEEN_IN_KEPT_STRUCTURE = (
    "attention_crosses_documents",
    "documents_are_forgotten_across_ranks",
    "gradients_below_the_largest_norm_are_scaled_up",
    "the_last_micro_batch_is_dropped",
    "later_stages_have_no_rotary_positions",
    "yarn_is_lost_on_a_later_stage",
    "targets_of_multi_token_prediction_are_made_after_the_split",
    "the_balance_loss_is_never_added",
    "the_balance_loss_is_divided_by_the_number_of_data_ranks",
    "the_balance_loss_counts_on_every_tensor_rank",
    "the_balance_loss_uses_the_counts_of_this_ranks_columns",
    "muon_returns_the_pieces_of_another_rank",
    "heads_of_a_rank_return_in_reverse_order",
    "grouped_queries_read_keys_in_turn",
    "tokens_above_twice_the_mean_of_an_expert_are_dropped",
    "the_second_bucket_of_gradients_is_not_reduced",
    "wsd_decays_from_the_end_of_the_warm_up",
    "losses_of_a_sharded_vocabulary_are_added_in_16_bits",
    "the_last_token_of_a_document_is_computed_with_the_next_one",
    "a_window_is_one_key_short_at_the_border_of_a_block",
    "gradients_of_shared_heads_of_keys_are_not_summed",
)
"""They show only where a reduction keeps documents, layers, micro-batches, routing, shard bounds, two
heads of a rank, experts above the mean, buckets, steps of the decay, types of losses.
"""
DROP_OUT = (
    "masks_of_every_step_are_those_of_the_first",
    "a_recomputed_forward_drops_other_entries",
    "context_ranks_drop_by_their_own_columns",
    "tensor_ranks_drop_by_their_own_heads",
)
"""Masks of the wrong step, of a recomputation, of columns, of heads."""
SEEN_IN_FIRST_STEP = (
    "ids_have_fifteen_bits",
    "positions_are_rounded_to_bfloat16",
    "the_first_row_of_a_large_gradient_is_not_normed",
)
"""They need sizes that a reduction does not keep."""
ATTRIBUTED = (*REPRESENTATIVE, *MORE_REPRESENTATIVE, *SEEN_IN_KEPT_STRUCTURE, *DROP_OUT)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MutantTrials]:
    folder = tmp_path_factory.mktemp("mutants")
    write_texts(folder)
    return MutantTrials(folder)


@pytest.mark.parametrize(
    "name",
    [
        *REPRESENTATIVE,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*MORE_REPRESENTATIVE, *SEEN_IN_KEPT_STRUCTURE, *DROP_OUT)
        ),
    ],
)
def test_proof_reports_the_mutant_with_its_block_and_axis(name: str, trials: MutantTrials) -> None:
    result = trials.trial(MUTANTS[name])
    assert result.has_effect, "the mutant changes what is trained"
    assert result.is_detected, result.message
    assert result.is_attributed, f"{result.axis!r}, {result.block!r}: {result.message}"


def test_the_first_step_shows_a_mutant_that_a_reduction_hides(trials: MutantTrials) -> None:
    mutant = MUTANTS["a_later_micro_batch_reads_the_slot_of_an_earlier_one"]
    seen = seen_in_first_step(mutant, trials.run_as_started(mutant.layout))
    assert seen.block == "embed"
    assert "missing in 2 of 4 sequences of the step" in seen.message


def test_the_first_step_of_a_healthy_run_is_equal(trials: MutantTrials) -> None:
    healthy = Mutant("healthy", "nothing goes wrong", MutantLayout("pp2 tp2"), ())
    case = trials.run_as_started(healthy.layout)
    assert not seen_in_first_step(healthy, case).is_seen
    assert not seen_by_types(healthy, case, mismatched_types).is_seen


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN_IN_FIRST_STEP)
def test_a_run_with_the_mutant_stops_in_its_first_step(name: str, trials: MutantTrials) -> None:
    result = trials.trial(MUTANTS[name])
    assert not result.is_seen_by_proof, result.message
    assert result.is_detected
    assert result.is_attributed, f"{result.axis!r}, {result.block!r}: {result.message}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in ATTRIBUTED])
def test_proof_reports_every_other_mutant(name: str, trials: MutantTrials) -> None:
    result = trials.trial(MUTANTS[name])
    assert result.has_effect, "the mutant changes what is trained"
    assert result.is_detected, result.message


def test_a_mutant_without_effect_is_not_detected(trials: MutantTrials) -> None:
    """Overlapping names of one layer: nothing on this layout calls the function."""
    idle = FunctionFault("weft.parallel.context.ring:RingAccumulator.finish", nothing)
    mutant = Mutant("idle", "nothing goes wrong", MutantLayout("dp2"), (idle,))
    result = trials.trial(mutant)
    assert not result.has_effect
    assert not result.is_detected


def test_there_are_eighty_mutants_and_each_says_what_goes_wrong_and_where() -> None:
    assert len(MUTANTS) >= 80
    for mutant in MUTANTS.values():
        assert mutant.what
        assert mutant.blocks, f"{mutant.name}: where a proof must see it"
        assert mutant.axes, f"{mutant.name}: the axis that a proof must name"


def test_every_mutant_has_a_run_of_a_user_which_is_reduced(trials: MutantTrials) -> None:
    layouts = {(mutant.layout, mutant.steps) for mutant in MUTANTS.values()}
    for layout, steps in layouts:
        run = load([*user_words(layout, trials.folder)], FAMILIES)
        case = trials.user_case(layout, steps=steps)
        assert not [check for check in config_checks(run) if check.fails()], layout
        assert run.model.architecture["layers"] >= 12, layout
        assert case.run.model.architecture["layers"] == 3, layout
        assert case.run.num_micro > 1 or run.num_micro == 1, layout
        assert case.run.device_mesh == run.device_mesh


def test_names_are_read_without_importing_the_mutants() -> None:
    assert sorted(mutant_names()) == sorted(MUTANTS)


def test_planting_ends_with_the_block() -> None:
    before = TrainStep.__dict__["_count_targets"]
    fault = FunctionFault("weft.train.step:TrainStep._count_targets", returns(0))
    with planted(Mutant("m", "w", MutantLayout(""), (fault,))):
        assert TrainStep.__dict__["_count_targets"] is not before
    assert TrainStep.__dict__["_count_targets"] is before


SUM_OF_SITE = {
    "skip": (1.0, 2.0),
    "scale": (30.0, 30.0),
    "avg": (1.5, 1.5),
    "max": (2.0, 2.0),
    "twice": (6.0, 6.0),
    "zero": (1.0, 1.0),
}


def sum_over_dp(comm: Comm) -> float:
    """The site of the collectives that the next test changes."""
    own = torch.tensor([comm.rank + 1.0])
    return comm.all_reduce(own, "dp").item()


@pytest.mark.parametrize("change", SUM_OF_SITE)
def test_a_faulty_collective_changes_the_calls_of_its_site_alone(change: CollectiveChange) -> None:
    fault = CollectiveFault("sum_over_dp", change, place=1 if change == "zero" else None, factor=10)

    def elsewhere(comm: Comm) -> float:
        return comm.all_reduce(torch.tensor([comm.rank + 1.0]), "dp").item()

    with planted(Mutant("m", "w", MutantLayout("dp2"), (fault,))):
        assert tuple(run_ranks("dp2", sum_over_dp)) == SUM_OF_SITE[change]
        assert run_ranks("dp2", elsewhere) == [3.0, 3.0]


@pytest.mark.parametrize(("change", "gathered"), [("reverse", [2.0, 1.0]), ("repeat", [1.0, 1.0])])
def test_pieces_of_a_gather_are_permuted_or_repeated(
    change: CollectiveChange, gathered: list[float]
) -> None:
    fault = CollectiveFault("gather_over_dp", change, op="all_gather")
    with planted(Mutant("m", "w", MutantLayout("dp2"), (fault,))):
        assert run_ranks("dp2", gather_over_dp) == [gathered, gathered]


def gather_over_dp(comm: Comm) -> list[float]:
    """The site of the collectives that the last test changes."""
    own = torch.tensor([comm.rank + 1.0])
    found: list[float] = comm.all_gather(own, "dp").tolist()
    return found


def test_texts_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    write_texts(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_texts(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
