"""Heads of keys and values that several ranks of tp share: which ones a rank's queries read, and layouts beside one device."""

from __future__ import annotations

import pytest
import torch

from tests.matrix.layouts import Case, check
from weft.config.load import load
from weft.config.run import plan_of
from weft.core.mesh import Mesh
from weft.core.shard import Stacked, shard_of
from weft.errors import PlanError
from weft.layout.explain import explain
from weft.layout.plan import sharding_rule_of
from weft.models import FAMILIES
from weft.models.common.attention import OwnHeads


@pytest.mark.parametrize(
    ("num_heads", "num_shared", "degree"),
    [(8, 2, 4), (8, 2, 8), (12, 4, 6), (12, 6, 4), (16, 8, 2), (24, 6, 4), (6, 1, 3), (30, 10, 6)],
)
def test_each_head_of_queries_reads_the_head_that_it_reads_on_one_device(
    num_heads: int, num_shared: int, degree: int
) -> None:
    shared_BSGK = torch.arange(num_shared).view(1, 1, num_shared, 1)
    read: list[int] = []
    for index in range(degree):
        own = OwnHeads.of_rank(index, num_heads // degree, total=num_heads)
        selected = own.select(shared_BSGK)
        group, rest = divmod(own.number, selected.shape[2])
        assert rest == 0
        read += selected.flatten().repeat_interleave(group).tolist()
    assert read == [head * num_shared // num_heads for head in range(num_heads)]


CASES = (
    Case("tp4", family="qwen2", microbatches=2),
    Case("tp4 cp2", family="qwen2", microbatches=2, sequence=True),
    Case("tp8", family="qwen3", microbatches=2, sequence=True),
    Case("pp2 tp4", family="mistral", schedule="zero_bubble", microbatches=2, seq_len=16),
)
SLOW_CASES = (
    Case("tp4 dp2", family="gemma3", zero=3, microbatches=2, seq_len=16),
    Case("tp4 dp2", family="mistral", zero=2, recompute="selective", microbatches=2, seq_len=16),
    Case("pp2 tp4", family="qwen2", schedule="zbv", chunks=2, microbatches=2, sequence=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_with_more_ranks_than_heads_of_keys_equal_one_device(case: Case) -> None:
    sizes = case.config.axis_sizes()
    assert sizes["kv_heads"] % case.grid.degree("tp")
    assert "kv_heads" not in dict(sharding_rule_of(case.grid, sizes))
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_more_layouts_with_shared_heads_equal_one_device(case: Case) -> None:
    check(case)


def test_a_fused_projection_whose_shared_part_is_whole_is_one_line() -> None:
    mesh = Mesh.parse("tp4")
    rule = dict(sharding_rule_of(mesh, {"heads": 8, "kv_heads": 2}))
    qkv = Stacked(("heads", 8), ("kv_heads", 2), ("kv_heads", 2))
    with pytest.raises(PlanError, match="kv_heads is whole on this mesh"):
        shard_of("qkv", (96, 8), (qkv, "dim"), rule=rule, mesh=mesh, rank=0)


@pytest.mark.parametrize(("mesh", "is_said"), [("dp2 tp4", True), ("dp4 tp2", False)])
def test_the_layout_says_which_heads_are_whole(mesh: str, is_said: bool) -> None:
    plan = plan_of(load(["--mesh", mesh], FAMILIES))
    line = "  kv_heads: whole on every rank, as tp4 does not divide them"
    assert (line in explain(plan).splitlines()) == is_said
