"""Tensor parallelism in a plain script: linears and embeddings of a module are replaced by sharded ones, in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.core.model_config import match_row
from weft.core.shard import DimAxis, Stacked
from weft.errors import Fault, PlanError
from weft.models.user_model import UserTable
from weft.parallel.autograd.holders import holders_of
from weft.parallel.model.chain import replace_module
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.tensor.sequence import SequenceParallel, shard_sequence
from weft.parallel.tensor.vocab import VocabParallelEmbedding
from weft.parallel.tp import AXIS

ShardedLayer = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding


def shard_modules(
    module: nn.Module,
    comm: Comm,
    axes: UserTable,
    *,
    axis: Axis = AXIS,
    gathered: Sequence[str] = (),
    sequence: SequenceParallel | None = None,
) -> nn.Module:
    """The module with its layers sharded over `axis`; see `weft.parallelize`."""
    if comm.degree(axis) == 1:
        return module
    found = _layers(module, axes)
    ties: dict[int, nn.Parameter] = {}
    for path, layer, dims in found:
        sharded = _sharded(path, layer, dims, comm=comm, axis=axis, is_gathered=path in gathered)
        _keep_ties(path, layer, sharded, ties)
        module = replace_module(module, layer, sharded)
    unknown = set(gathered) - {path for path, _, _ in found}
    if unknown:
        fault = Fault(
            "gathered",
            "names no layer that is sharded by its outputs",
            got=", ".join(sorted(unknown)),
            fix="the path of a linear whose weight is (name, None) in axes",
        )
        raise PlanError(fault)
    _check_tied(module, ties)
    if sequence is not None:
        shard_sequence(module, sequence, comm, axis)
    return module


def _keep_ties(
    path: str, layer: nn.Module, sharded: nn.Module, ties: dict[int, nn.Parameter]
) -> None:
    """Have layers that share a parameter share their part of it.

    Args:
        ties: id of a whole parameter -> this rank's part.
    """
    for key, part in sharded.named_parameters(recurse=False):
        first = ties.setdefault(id(layer.get_parameter(key)), part)
        if first.shape != part.shape or holders_of(first) != holders_of(part):
            fault = Fault(
                f"axes: {path}.{key}",
                "is shared with a layer that is sharded along another dim",
                got=str(list(part.shape)),
                need=str(list(first.shape)),
                fix="the same axes for both",
            )
            raise PlanError(fault)
        sharded.register_parameter(key, first)


def _check_tied(module: nn.Module, ties: Collection[int]) -> None:
    """Reject a layer that is whole, and shares a parameter with one that has become sharded."""
    for name, param in module.named_parameters():
        if id(param) in ties:
            fault = Fault(
                f"axes: {name}",
                "is whole, and shared with a layer that is sharded",
                fix="the same axes for both",
            )
            raise PlanError(fault)


def _layers(
    module: nn.Module, table: UserTable
) -> list[tuple[str, nn.Module, tuple[DimAxis | None, ...]]]:
    """(path, layer, axes of the dims of its weight) of each layer to be sharded.

    Raises:
        PlanError: an axis of a parameter that is no weight or bias of a linear or an embedding.
    """
    found: list[tuple[str, nn.Module, tuple[DimAxis | None, ...]]] = []
    for path, layer in module.named_modules():
        for key, param in layer.named_parameters(recurse=False):
            name = f"{path}.{key}".lstrip(".")
            dims = _dims(name, param, table)
            if not any(dims):
                continue
            if not isinstance(layer, (nn.Linear, nn.Embedding)):
                what = "is no weight or bias of a torch.nn.Linear or Embedding, so it cannot be sharded alone"
                fix = "None for its dims, or weft.parallelize with a plan, which traces the model"
                raise PlanError(Fault(f"axes: {name}", what, got=type(layer).__name__, fix=fix))
            if key == "weight":
                found.append((path, layer, dims))
    return found


def _dims(name: str, param: Tensor, table: UserTable) -> tuple[DimAxis | None, ...]:
    if not any(fnmatchcase(name, pattern) for pattern in table):
        return ()
    dims = match_row(name, table, title="AXES")
    if len(dims) != param.dim():
        fault = Fault(
            f"axes: {name}",
            "needs one name, or None, for each dim",
            got=str(list(dims)),
            need=f"{param.dim()} dims",
            fix="a pattern that names weights alone: a bias follows its weight",
        )
        raise PlanError(fault)
    return dims


def _sharded(
    path: str,
    layer: nn.Module,
    dims: tuple[DimAxis | None, ...],
    *,
    comm: Comm,
    axis: Axis,
    is_gathered: bool,
) -> nn.Module:
    """This rank's part of a layer, with its values."""
    by_rows = dims[0] is not None
    if by_rows and dims[1] is not None:
        what = "is sharded along both dims, and a tensor-parallel axis shards one"
        raise PlanError(
            Fault(f"axes: {path}.weight", what, got=str(list(dims)), fix="None for one")
        )
    new: ShardedLayer
    if isinstance(layer, nn.Embedding):
        _check_embedding(path, layer, by_rows=by_rows, is_stacked=isinstance(dims[0], Stacked))
        new = VocabParallelEmbedding(
            layer.num_embeddings,
            layer.embedding_dim,
            comm=comm,
            padding_idx=layer.padding_idx,
            axis=axis,
            device=layer.weight.device,
            dtype=layer.weight.dtype,
        )
    else:
        assert isinstance(layer, nn.Linear), "layers are linears and embeddings"
        dim = 0 if by_rows else 1
        parts = _parts(path, dims[dim], layer.weight.shape[dim], num_ranks=comm.degree(axis))
        new = _linear(
            layer, by_rows=by_rows, parts=parts, comm=comm, axis=axis, is_gathered=is_gathered
        )
    _copy_own(layer, new)
    return new.train(layer.training)


def _parts(path: str, dim: DimAxis | None, length: int, *, num_ranks: int) -> tuple[int, ...]:
    """Lengths of the projections of a dim, each of which is sharded separately; none of a plain one.

    Raises:
        PlanError: their units do not fit the dim, or do not divide over the ranks.
    """
    if not isinstance(dim, Stacked):
        return ()
    name = f"axes: {path}.weight"
    sizes = dim.sizes(length)
    if sizes is None:
        total = sum(units for _, units in dim.parts)
        need = f"a multiple of {total}, the units of all parts"
        raise PlanError(Fault(name, f"units of {dim} do not fit", got=str(length), need=need))
    for part, units in dim.parts:
        if units % num_ranks:
            what = f"part {part!r} of a Stacked dim does not divide"
            need = f"a multiple of {num_ranks} ranks"
            raise PlanError(Fault(name, what, got=f"{units} units", need=need))
    return sizes


def _linear(
    layer: nn.Linear,
    *,
    by_rows: bool,
    parts: tuple[int, ...],
    comm: Comm,
    axis: Axis,
    is_gathered: bool,
) -> ColumnParallelLinear | RowParallelLinear:
    has_bias = layer.bias is not None
    device, dtype = layer.weight.device, layer.weight.dtype
    sizes = (layer.in_features, layer.out_features)
    if not by_rows:
        return RowParallelLinear(
            *sizes, comm=comm, bias=has_bias, axis=axis, parts=parts, device=device, dtype=dtype
        )
    return ColumnParallelLinear(
        *sizes,
        comm=comm,
        bias=has_bias,
        axis=axis,
        parts=parts,
        gather_output=is_gathered,
        device=device,
        dtype=dtype,
    )


def _check_embedding(path: str, layer: nn.Embedding, *, by_rows: bool, is_stacked: bool) -> None:
    given = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(layer, name)]
    if is_stacked:
        given.append("Stacked")
    if by_rows and not given:
        return
    fault = Fault(
        f"axes: {path}.weight",
        "is an embedding that cannot be sharded this way",
        got=", ".join(given) or "features",
        need="(name, None), without max_norm, scale_grad_by_freq and sparse",
        fix="(None, None) leaves it whole",
    )
    raise PlanError(fault)


@torch.no_grad()
def _copy_own(layer: nn.Module, new: ShardedLayer) -> None:
    """Give a sharded layer this rank's part of the values, which are the same on all ranks."""
    whole = dict(layer.named_parameters(recurse=False))
    for key, param in new.named_parameters(recurse=False):
        value = whole[key].detach()
        holders = holders_of(param)
        if holders is not None:
            value = holders.own_part(value)
        param.copy_(value)
        param.requires_grad_(whole[key].requires_grad)
