"""The transform of the dimension tp: linears, embeddings and losses work on shards of heads, features and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.comm.comm import Comm
from weft.core.model_config import AxisTable
from weft.layout.plan import Plan
from weft.models.common.init import named_parameters
from weft.parallel.tensor import linear, vocab
from weft.parallel.tp import AXIS


def transform(
    blocks: dict[str, nn.Module], *, plan: Plan, comm: Comm, axes: AxisTable, axis_sizes: Mapping[str, int]
) -> frozenset[str]:
    """Make the blocks tensor parallel; their parameters are sharded already.

    Returns the names of the parameters whose gradients are partial sums over tp: those used inside a tensor-parallel region
    and, under sequence parallelism, all others.

    Raises:
        PlanError: a linear that cannot be sharded as `axes` says.
    """
    if comm.degree(AXIS) == 1:
        return frozenset()
    rule, sequence = plan.sharding_rule, plan.sequence_parallel
    inside: set[str] = set()
    for name, block in blocks.items():
        inside |= linear.apply(name, block, comm=comm, table=axes, rule=rule, sequence=sequence)
        vocab.apply(name, block, comm=comm, table=axes, rule=rule, sequence=sequence)
    if "vocab" in rule and "vocab" in axis_sizes:
        vocab.cut_losses(blocks, vocab=axis_sizes["vocab"], comm=comm)
    outside = frozenset(named_parameters(blocks)) if sequence else frozenset()
    return outside | inside
