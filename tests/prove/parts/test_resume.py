"""The proof of resumes: healthy continuations hold, and faults of positions, snapshots and other layouts are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.prove.faults import FLOAT64, small_run
from weft.checkpoint.memory import MemorySnapshots
from weft.config.other_layouts import elastic_mesh, on_mesh, other_meshes
from weft.prove.parts.continuation import Continuation, continuations
from weft.prove.parts.part_proof import Outcome
from weft.prove.parts.resume import resume_passes
from weft.prove.report import Difference
from weft.prove.subject import Subject
from weft.run.run_ranks import arithmetic_of_ranks
from weft.train.data_loader import DataLoader
from weft_selftest.mutants.changes import nothing
from weft_selftest.mutants.plant import replaced

DP2 = f"--mesh dp2 {FLOAT64}"
ON_ONE_RANK = Continuation("checkpoint", "")


def outcome_of(words: str, *how: Continuation, steps: int = 2) -> Outcome:
    """The proof of some continuations of a run at reduced size."""
    run = small_run(words)
    if not how:
        how = continuations(
            run.mesh,
            num_ranks=run.device_mesh.size,
            others=other_meshes(run),
            elastic=elastic_mesh(run),
        )
    found = Outcome()
    with arithmetic_of_ranks():
        found.take(resume_passes(Subject.of(run, steps=steps), how))
    return found


def first_difference(words: str, *how: Continuation, steps: int = 2) -> Difference:
    found = outcome_of(words, *how, steps=steps)
    differences = found.passes[-1].differences
    assert differences, "the fault is reported"
    return differences[0]


def test_continuations_on_the_own_layout_come_first() -> None:
    found = continuations("dp2", num_ranks=2, others=("", "tp2"), elastic="dp1")
    assert [(each.store, each.mesh) for each in found] == [
        ("checkpoint", "dp2"),
        ("memory", "dp2"),
        ("nodes", "dp2"),
        ("memory", "dp1"),
        ("checkpoint", ""),
        ("checkpoint", "tp2"),
    ]


def test_a_run_on_one_rank_has_no_nodes_and_no_elastic_mesh() -> None:
    run = small_run("")
    assert elastic_mesh(run) is None
    found = continuations("", num_ranks=1, others=other_meshes(run), elastic=None)
    assert {each.store for each in found} == {"checkpoint", "memory"}


@pytest.mark.parametrize(
    ("mesh", "elastic"), [("dp4 tp2", "dp3 tp2"), ("tp2", "dp1"), ("pp2 dp2", "pp2")]
)
def test_an_elastic_mesh_has_the_most_ranks_that_are_left(mesh: str, elastic: str) -> None:
    run = small_run(f"--mesh '{mesh}'").with_values({"batch.global_size": 24})
    found = elastic_mesh(run)
    assert found is not None
    assert sorted(found.split()) == sorted(elastic.split())


def test_options_that_another_mesh_does_not_take_have_their_defaults() -> None:
    run = small_run("--mesh pp2 --pipeline.split 1 2 --parallel.recompute full")
    assert run.pipeline.split
    changed = on_mesh(run, "")
    assert changed is not None
    assert not changed.pipeline.split
    assert changed.batch == run.batch


def test_a_run_that_goes_on_with_one_rank_is_equal() -> None:
    """After two of four steps: a third one was trained before the stop, and is lost."""
    found = outcome_of(DP2, ON_ONE_RANK, steps=4)
    assert found.is_equal
    assert sum(each.compared for each in found.passes) > 500


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        DP2,
        "--mesh 'dp2 tp2' --parallel.zero 3 --precision.compute bfloat16",
        "--mesh dp2 --precision.compute float16",
        f"--mesh ep2 --model.name deepseek --model.mtp_depth 1 {FLOAT64}",
        f"--mesh dp2 --loss dpo --data.packing documents {FLOAT64}",
        f"--mesh pp2 --lora.rank 2 {FLOAT64}",
        "--model.name mnist --mesh dp2",
    ],
)
def test_all_continuations_are_equal(words: str) -> None:
    found = outcome_of(words, steps=4)
    assert found.is_equal, [str(each) for each in found.passes[-1].differences]


def test_a_place_in_the_data_that_another_layout_forgets_is_found() -> None:
    def from_the_start(right: Callable[..., Any], self: DataLoader, step: int) -> Any:
        return right(self, 0 if self.degree == 1 else step)

    with replaced("weft.train.data_loader:DataLoader.batches", from_the_start):
        first = first_difference(DP2, ON_ONE_RANK)
    assert (first.phase, first.step, first.tensor) == ("batch", 2, "inputs")


def test_a_snapshot_of_the_step_before_is_found() -> None:
    """It is named after its step, and holds the state of the one before."""

    def is_due(right: object, self: MemorySnapshots, step: int, status: int) -> bool:
        del right, self, status
        return step == 1

    def take(right: Callable[..., Any], self: MemorySnapshots, step: int) -> Any:
        return right(self, step + 1)

    with (
        replaced("weft.checkpoint.memory:MemorySnapshots.is_due", is_due),
        replaced("weft.checkpoint.memory:MemorySnapshots._take", take),
    ):
        first = first_difference(DP2, Continuation("memory", "dp2"), steps=4)
    assert (first.phase, first.step) == ("checkpoint", 2)
    assert "stale" in first.relation


def test_snapshots_without_copies_on_other_nodes_are_found() -> None:
    """After the loss of a node such a run begins again, and computes what one device computes."""
    with replaced("weft.checkpoint.node_memory:NodeSaver._exchange", nothing):
        first = first_difference(DP2, Continuation("nodes", "dp2"))
    assert first.tensor == "number of steps that are done"
    assert first.step == 1


def test_a_learning_rate_of_the_ranks_that_are_left_is_found() -> None:
    """An elastic change that scales the rate with the data ranks."""

    def update(right: Callable[..., Any], self: Any, lr: float) -> None:
        num_data_ranks = self.model.comm.degree("dp")
        right(self, lr * num_data_ranks / 2)

    with replaced("weft.train.step:TrainStep.update", update):
        first = first_difference(DP2, Continuation("memory", "dp1"))
    assert (first.phase, first.step) == ("update", 2)
    assert first.relation == "updated by 1/2 times the right change"


@pytest.mark.slow
def test_a_loss_scale_that_is_not_restored_is_found() -> None:
    def restored_scale(right: Callable[..., Any], self: Any, *args: Any, **named: Any) -> None:
        scale = self.loss_scale
        right(self, *args, **named)
        self.loss_scale = scale

    words = "--mesh dp2 --precision.compute float16 --optim.lr 0.1"
    with replaced("weft.train.loss_scale:LossScale.after", _grows):
        healthy = outcome_of(words, ON_ONE_RANK, steps=4)
        assert healthy.is_equal
        with replaced("weft.train.step:TrainStep.restore", restored_scale):
            first = first_difference(words, ON_ONE_RANK, steps=4)
    assert first.tensor == "loss scale"


def _grows(right: Callable[..., Any], self: Any, *, is_finite: bool) -> Any:
    """A loss scale that grows after every step."""
    found = right(self, is_finite=is_finite)
    return type(self)(found.value * 2, is_dynamic=True) if self.is_dynamic else found
