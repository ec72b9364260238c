"""`weft.parallelize`: a chain of blocks under a plan, or the layers of any module in a plain script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.layout.plan import Plan
from weft.models.common.batch import Batch
from weft.models.user_model import UserTable
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.model.parallelize import parallelize as parallelize_chain
from weft.parallel.tensor.plain_modules import shard_modules
from weft.parallel.tensor.sequence import SequenceParallel


@overload
def parallelize(
    model: nn.Module,
    plan: Comm,
    comm: UserTable,
    /,
    *,
    axis: Axis = ...,
    gathered: Sequence[str] = ...,
    sequence: SequenceParallel | None = ...,
) -> nn.Module: ...


@overload
def parallelize(
    model: nn.Module,
    plan: Comm,
    /,
    *,
    axes: UserTable,
    axis: Axis = ...,
    gathered: Sequence[str] = ...,
    sequence: SequenceParallel | None = ...,
) -> nn.Module: ...


@overload
def parallelize(
    model: Mapping[str, nn.Module] | nn.ModuleDict,
    plan: Plan,
    comm: Comm,
    *,
    axes: UserTable | None = None,
    ties: Mapping[str, str] | None = None,
    example: Batch | None = None,
) -> ParallelModel: ...


def parallelize(
    model: Any,
    plan: Plan | Comm,
    comm: Comm | UserTable | None = None,
    *,
    axes: Any = None,
    **options: Any,
) -> nn.Module | ParallelModel:
    """Shard a model over ranks.

    `parallelize(module, comm, axes)` replaces the linears and embeddings of a module by sharded ones,
    in place, and returns it, as torch's `parallelize_module`. Every rank has the same values before, and
    keeps its part of them.

        axes = {"*.up.weight": ("ffn", None), "*.up.bias": ("ffn",), "*.down.weight": (None, "ffn")}
        net = weft.parallelize(net, comm, axes)     # up by its outputs, down by its inputs

    A name of dim 0 of a linear's weight shards its outputs (`ColumnParallelLinear`), of dim 1 its
    inputs (`RowParallelLinear`, whose outputs are summed), of dim 0 of an embedding its rows. What
    lies between works on this rank's part of the features: attention on its heads. Parameters that no
    pattern matches stay whole; tied ones stay tied. Optimizers may be elementwise, or read norms and
    sums of whole layers (LARS, LAMB); others (Muon, Adafactor) go into a `ShardedOptimizer`. The
    options are `axis`, the mesh axis ("tp"), `gathered`, paths of linears whose outputs are gathered,
    and `sequence`, a `SequenceParallel`: which modules work on parts of the sequence.

    `parallelize(blocks, plan, comm)` is what `weft train` does, for every dimension. `blocks` is an
    ordered mapping of block name -> plain module, the last of which yields the summed loss; it is
    changed in place: those of other stages are dropped, parameters are sharded as `axes` and the
    plan's rule say, and each dimension's transform is applied. The options are `ties`, alias -> owner
    of tied parameters, and `example`, a micro-batch on the meta device.

    Raises:
        PlanError: a parameter that two rows of `axes` match, a layer that cannot be sharded so, or a model
            that would not compute on shards what it computes on one device.
    """
    if isinstance(plan, Comm):
        table = axes if comm is None else comm
        assert table is not None, "axes are given third, or by name"
        assert not isinstance(table, Comm), "the third argument is the table"
        return shard_modules(model, plan, table, **options)
    assert isinstance(comm, Comm), "a plan is followed by the communication"
    return parallelize_chain(model, plan, comm, axes=axes, **options)
