"""The plan as a value: JSON, digest, checks, explanation."""

from __future__ import annotations

import pytest

from tests.matrix.layouts import Case
from weft.core.mesh import Mesh
from weft.core.sequence import Context
from weft.errors import PlanError
from weft.layout.explain import explain
from weft.layout.plan import Plan


@pytest.fixture
def plan() -> Plan:
    return Case("pp2 dp2 tp2", schedule="interleaved", chunks=2, sequence=True).plan


def test_json_reads_back_equal_and_equal_plans_share_a_digest(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest == plan.digest
    other = again.model_copy(update={"microbatches": 8})
    assert other.digest != plan.digest


def test_a_valid_plan_passes_its_check(plan: Plan) -> None:
    plan.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"microbatches": 3}, "micro-batches"),
        ({"chunks": 3}, "the schedule has another number of stages"),
        ({"seq_len": 7}, "does not divide"),
        ({"rule": (("heads", "xp"),)}, "axes that no mesh has: xp"),
    ],
)
def test_parts_that_do_not_fit_are_named(plan: Plan, change: dict[str, object], said: str) -> None:
    changed = plan.model_copy(update=change)
    with pytest.raises(PlanError) as error:
        changed.check()
    assert said in str(error.value)


def test_a_block_on_two_stages_is_named(plan: Plan) -> None:
    doubled = (plan.stages[0], *plan.stages[:-1])
    changed = plan.model_copy(update={"stages": doubled})
    with pytest.raises(PlanError, match="more than one stage: embed"):
        changed.check()


def test_boundary_shape_is_what_one_rank_holds(plan: Plan) -> None:
    assert plan.boundary_shape(0) == (1, 4, 32)
    whole_sequences = {"sequence_parallel": False, "micro_size": 3}
    changed = plan.model_copy(update=whole_sequences)
    assert changed.boundary_shape(0) == (3, 8, 32)


def test_explanation_names_mesh_stages_bubble_and_traffic(plan: Plan) -> None:
    text = explain(plan)
    for said in (
        "mesh pp2 dp2 tp2: 8 ranks",
        "[0 1]",
        "stage 3 on pp1",
        "bubble 11.1% (predicted)",
        "8 sequences of 8",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("context", "said"), [("ring", "around a ring"), ("ulysses", "between positions and heads")]
)
def test_explanation_says_how_attention_crosses_cp(plan: Plan, context: Context, said: str) -> None:
    without_cp = plan.model_copy(update={"context": context})
    assert said not in explain(without_cp)
    mesh = Mesh.parse("pp2 cp2 tp2")
    with_cp = without_cp.model_copy(update={"mesh": mesh})
    assert said in explain(with_cp)


@pytest.mark.parametrize(
    ("zero", "line"),
    [
        (1, "ZeRO 1 over dp x cp: optimizer states are sharded"),
        (2, "ZeRO 2 over dp x cp: states and gradients are sharded"),
        (3, "ZeRO 3 over dp x cp: states, gradients and parameters are sharded"),
    ],
)
def test_an_explanation_says_what_zero_shards_and_over_which_ranks(zero, line):
    case = Case("dp2 cp2 tp2", zero=zero)
    reported = explain(case.plan)
    assert line in reported
    assert ("every micro-batch" in reported) == (zero > 1)
    nothing_to_shard_over = Case("tp2", zero=zero)
    assert "ZeRO" not in explain(nothing_to_shard_over.plan)


@pytest.mark.parametrize("mesh", ["pp2 dp512 cp16 tp8", "tp1024 pp2 ep4"])
def test_an_explanation_of_a_large_mesh_fits_80_columns(mesh: str) -> None:
    case = Case("pp2 dp2 tp2", schedule="interleaved", chunks=2, zero=3, sequence=True)
    wide = case.plan.model_copy(update={"mesh": Mesh.parse(mesh)})
    for line in explain(wide).splitlines():
        assert len(line) <= 80
