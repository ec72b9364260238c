"""Owns the step from a plain model to this rank's part of it: which blocks, which pieces, which transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import Box, data_axes, gradient_axes, sharding_axes
from weft.core.dimension import dimensions, pipeline_axis
from weft.core.model_config import AxisTable, InitTable, logical_axes
from weft.core.shard import Shard, first_axes, shard_of
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.models import FAMILIES
from weft.models.common.attention import Attend
from weft.models.common.experts import Experts
from weft.models.common.init import init_params, named_parameters, tie
from weft.models.common.lora import Factor
from weft.models.common.moe import Router
from weft.parallel.expert import dispatch
from weft.parallel.recompute.blocks import recompute_block
from weft.parallel.tensor import linear, vocab
from weft.schedule.actions import Act


@dataclass(frozen=True)
class ParamShard:
    """What this rank holds of one parameter, and over which mesh axes its gradient is summed.

    Attributes:
        name: global name, the same under every layout.
        owner: the name it is tied to, or its own.
        shape: of the whole parameter.
        shard: the entries of it that this rank holds.
        shard_axes: mesh axes over which it is sharded.
        reduce_axes: mesh axes over which its gradient is summed.
    """

    name: str
    owner: str
    shape: tuple[int, ...]
    shard: Shard
    shard_axes: tuple[str, ...]
    reduce_axes: tuple[str, ...]

    @property
    def box(self) -> Box:
        """The shard as one box; a parameter with a `Stacked` dim has several, see `shard`."""
        (box,) = self.shard.boxes
        return box


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model under a plan.

    Attributes:
        stages: stage index -> its blocks, for the stages that live here.
        shards: global name -> geometry of each parameter here; a parameter under two names appears under its owner's.
        params: global name -> the parameter, same keys and order as `shards`.
        stage_of: global name -> the local stage whose backward completes its gradient.
        cross_stage_ties: (alias, owner) pairs that live on two pipeline ranks, with the other's pp index, in a fixed order.
        materialize: allocates the parameters of these names that are on the meta device and gives them their starting values.
    """

    plan: Plan
    comm: Comm
    stages: Mapping[int, nn.ModuleDict]
    shards: Mapping[str, ParamShard]
    params: Mapping[str, nn.Parameter]
    stage_of: Mapping[str, int]
    cross_stage_ties: tuple[CrossStageTie, ...]
    materialize: Callable[[Sequence[str]], None] = lambda names: None

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks that live here, by name."""
        return {name: block for stage in self.stages.values() for name, block in stage.items()}

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters here that nobody moves; routers' biases, which move without a gradient, are none of them."""
        routers = (module for block in self.blocks.values() for module in block.modules() if isinstance(module, Router))
        biases = {id(router.bias) for router in routers}
        return frozenset(
            name for name, param in self.params.items() if not param.requires_grad and id(param) not in biases
        )


@dataclass(frozen=True)
class CrossStageTie:
    """A tied parameter with copies on two pipeline ranks: both gradients are summed; the owner's copy counts in norms."""

    name: str
    peer: int
    is_owner: bool = True


def parallelize(
    model: Mapping[str, nn.Module] | nn.ModuleDict,
    plan: Plan,
    comm: Comm,
    *,
    axes: AxisTable | None = None,
    ties: Mapping[str, str] | None = None,
) -> ParallelModel:
    """This rank's part of `model`, an ordered mapping of block name -> plain module.

    The blocks of other stages are dropped, parameters are cut as `axes` and the plan's rule say, and each dimension's
    transform is applied. Parameters on the meta device stay there until `materialize_params`; real ones keep their values.

    Args:
        model: blocks in order; the last one yields the summed loss. It is changed in place: pass a fresh one.
        axes: pattern of parameter names -> logical axis of each dim, see `weft.core.model_config.AxisTable`; default: the table of
            the plan's family, or nothing that could be cut where the family is not one of weft's.
        ties: alias -> owner of tied parameters.

    Raises:
        PlanError: a parameter that no row or two rows of `axes` match, or a cut that no transform can serve.
    """
    ties = dict(ties or {})
    tie(model, ties)
    home, here = plan.table.stage_to_rank, comm.index(pipeline_axis())
    whole = named_parameters(model)
    axes = axes or _known_axes(plan, whole)
    shapes = {name: tuple(param.shape) for name, param in whole.items()}
    local = {i: stage.blocks for i, stage in enumerate(plan.stages) if home[i] == here}
    blocks = {name: model[name] for names in local.values() for name in names}
    _shard_parameters(blocks, plan, comm, axes=axes)
    tie(blocks, ties)
    partial = _apply_transforms(blocks, plan, comm, axes=axes, sizes=_axis_lengths(shapes, axes))
    _check_served(blocks, plan, axes=axes)
    stages = {
        i: nn.ModuleDict({name: recompute_block(name, blocks[name], plan.recompute) for name in names})
        for i, names in local.items()
    }
    block_stage = {name: i for i, stage in enumerate(plan.stages) for name in stage.blocks}
    params = {
        name: param
        for name, param in named_parameters(blocks).items()
        if not (name in ties and ties[name].partition(".")[0] in blocks)
    }
    shards = {
        name: _shard(
            name, shapes[name], plan, comm, axes=axes, owner=ties.get(name, name), partial=_axes_with(partial, name)
        )
        for name in params
    }
    return ParallelModel(
        plan=plan,
        comm=comm,
        stages=stages,
        shards=shards,
        params=params,
        stage_of=_completing_stages(stages, params, plan.table.rows[here]),
        cross_stage_ties=_cross_stage_ties(ties, params, {name: home[i] for name, i in block_stage.items()}, here),
    )


def materialize_params(
    model: ParallelModel,
    table: InitTable,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    names: Sequence[str] | None = None,
) -> None:
    """Give parameters on the meta device memory and their starting values, which depend on seed, name and full shape only.

    `names` are those parameters that shall have them; default: all.
    """
    chosen = tuple(model.params) if names is None else tuple(names)
    for param in (model.params[name] for name in chosen):
        empty = nn.Parameter(torch.empty(param.shape, device=device, dtype=dtype), requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, empty)  # the modules and hooks that hold it keep the same object
    by_owner = {model.shards[name].owner: model.shards[name] for name in chosen}
    init_params(
        {model.shards[name].owner: model.params[name] for name in chosen},
        table,
        seed=seed,
        shapes={owner: piece.shape for owner, piece in by_owner.items()},
        shard=lambda owner, whole: read_shard(lambda box: whole[box.slices], by_owner[owner].shard),
    )


def read_shard(read: Callable[[Box], Tensor], shard: Shard) -> Tensor:
    """The local tensor of a shard, from a function that yields the entries of one box."""
    tensors = [read(box) for box in shard.boxes]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=shard.dim)


def _shard_parameters(blocks: Mapping[str, nn.Module], plan: Plan, comm: Comm, *, axes: AxisTable) -> None:
    """Replace each parameter by this rank's shard of it."""
    for block_name, block in blocks.items():
        for path, param in list(block.named_parameters(remove_duplicate=False)):
            name = f"{block_name}.{path}"
            shape = tuple(param.shape)
            shard = shard_of(
                name,
                shape,
                logical_axes(name, axes),
                rule=plan.sharding_rule,
                mesh=plan.mesh,
                rank=comm.rank,
            )
            if shard.shape == shape:
                continue
            whole = param.detach()
            local = read_shard(lambda box, whole=whole: whole[box.slices], shard).clone()  # type: ignore[misc]
            parent, _, leaf = path.rpartition(".")
            setattr(block.get_submodule(parent), leaf, nn.Parameter(local, requires_grad=param.requires_grad))


def _apply_transforms(
    blocks: dict[str, nn.Module], plan: Plan, comm: Comm, *, axes: AxisTable, sizes: Mapping[str, int]
) -> dict[str, frozenset[str]]:
    """Apply each dimension's transform: mesh axis -> names of parameters whose gradients are partial sums along it."""
    partial: dict[str, frozenset[str]] = {}
    for axis, dimension in dimensions().items():
        transform = dimension.load_transform()
        if transform is not None:
            names = transform(blocks, plan=plan, comm=comm, axes=axes, axis_sizes=sizes)
            partial[axis] = frozenset(names)
    return partial


def _axes_with(partial: Mapping[str, frozenset[str]], name: str) -> tuple[str, ...]:
    """Mesh axes along which the gradient of this parameter is a partial sum."""
    return tuple(axis for axis, names in partial.items() if name in names)


def _known_axes(plan: Plan, params: Mapping[str, nn.Parameter]) -> AxisTable:
    if plan.family in FAMILIES:
        return FAMILIES[plan.family].AXES
    return {name: ("whole",) * param.ndim for name, param in params.items()}


def _axis_lengths(shapes: Mapping[str, tuple[int, ...]], axes: AxisTable) -> dict[str, int]:
    """Length of each logical axis, as the parameters have it."""
    return {
        axis: n
        for name, shape in shapes.items()
        for axis, n in zip(logical_axes(name, axes), shape, strict=True)
        if isinstance(axis, str)
    }


def _check_served(blocks: Mapping[str, nn.Module], plan: Plan, *, axes: AxisTable) -> None:
    """Refuse a parameter that was cut although no transform took over its module."""
    served = (
        linear.ColumnParallelLinear,
        linear.RowParallelLinear,
        vocab.VocabParallelEmbedding,
        Experts,
        Factor,
        Attend,
    )
    for block_name, block in blocks.items():
        for path, _ in block.named_parameters():
            name, logical = f"{block_name}.{path}", first_axes(logical_axes(f"{block_name}.{path}", axes))
            module = block.get_submodule(path.rpartition(".")[0])
            in_mixture = any(path.startswith(f"{mixture}.") for mixture in dispatch.mixtures(block))
            if (
                sharding_axes(logical, plan.sharding_rule, plan.mesh)
                and not isinstance(module, served)
                and not in_mixture
            ):
                raise PlanError(
                    Fault(
                        name,
                        f"{type(module).__name__} cannot hold a part of its {' x '.join(logical)}",
                        fix="name an axis that the plan's rule does not cut",
                    )
                )


def _shard(
    name: str, shape: tuple[int, ...], plan: Plan, comm: Comm, *, axes: AxisTable, owner: str, partial: tuple[str, ...]
) -> ParamShard:
    logical = logical_axes(name, axes)
    cut = sharding_axes(first_axes(logical), plan.sharding_rule, plan.mesh)
    varies = (*data_axes(plan.mesh), *partial)
    return ParamShard(
        name=name,
        owner=owner,
        shape=shape,
        shard=shard_of(name, shape, logical, rule=plan.sharding_rule, mesh=plan.mesh, rank=comm.rank),
        shard_axes=cut,
        reduce_axes=gradient_axes(plan.mesh, varies=varies, cut=cut),
    )


def _completing_stages(
    stages: Mapping[int, nn.ModuleDict], params: Mapping[str, nn.Parameter], row: Sequence[Act]
) -> dict[str, int]:
    """For each parameter the stage of those which use it that `row` is done with last; tied ones may stand in two."""
    done = {act.stage: place for place, act in enumerate(row)}
    by_param: dict[int, int] = {}
    for stage in sorted(stages, key=lambda stage: done[stage]):
        by_param |= dict.fromkeys(map(id, stages[stage].parameters()), stage)
    return {name: by_param[id(param)] for name, param in params.items()}


def _cross_stage_ties(
    ties: Mapping[str, str], params: Mapping[str, nn.Parameter], home: Mapping[str, int], here: int
) -> tuple[CrossStageTie, ...]:
    far = []
    for alias, owner in sorted(ties.items()):
        alias_home, owner_home = home[alias.partition(".")[0]], home[owner.partition(".")[0]]
        if alias_home == owner_home:
            continue
        if here == owner_home:
            far.append(CrossStageTie(name=owner, peer=alias_home))
        elif here == alias_home and alias in params:
            far.append(CrossStageTie(name=alias, peer=owner_home, is_owner=False))
    return tuple(far)
