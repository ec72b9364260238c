"""`parallelize`: this rank's part of a plain model: its blocks, the shards of their parameters, each dimension's transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import Box, data_axes, gradient_axes, sharding_axes
from weft.core.dimension import activation_axes, dimensions, pipeline_axis, position_axes
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import DimAxis, Shard, first_axes, shard_of
from weft.layout.plan import Plan
from weft.models import FAMILIES
from weft.models.common.batch import Batch, token_example
from weft.models.common.buffer_updates import BufferRecords, ignoring_updates, take_parts
from weft.models.common.init import named_parameters, tie
from weft.models.common.lazy_blocks import LazyBlocks
from weft.models.common.moe import Router
from weft.models.common.rope import share_angles
from weft.models.common.uncompiled import keep_compiler_unimported
from weft.parallel.model.chain import ChainSnapshot
from weft.parallel.model.chunked_losses import use_chunked_losses
from weft.parallel.model.compiled_block import CompiledBlock, compiled_block
from weft.parallel.model.dropout_blocks import (
    DropoutShards,
    dropping_block,
    drops_out,
    sharding_rank,
)
from weft.parallel.model.ties import (
    CrossStageTie,
    block_of,
    completing_stages,
    cross_stage_ties_of,
    own_named_parameters,
    shared_parameters,
    ties_on_rank,
)
from weft.parallel.recompute.blocks import recompute_blocks
from weft.parallel.recompute.offload import host_copying


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
        logical: logical axis of each dim.
    """

    name: str
    owner: str
    shape: tuple[int, ...]
    shard: Shard
    shard_axes: tuple[str, ...]
    reduce_axes: tuple[str, ...]
    logical: tuple[DimAxis, ...]

    @classmethod
    def of_buffer(cls, name: str, shape: tuple[int, ...]) -> ParamShard:
        """A buffer, which every rank holds whole."""
        whole = Shard((Box.whole(shape),))
        return cls(name, name, shape, whole, (), (), ("whole",) * len(shape))

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
        shards: global name -> geometry of each parameter here; a parameter under two names appears
            under its owner's.
        params: global name -> the parameter, same keys and order as `shards`.
        stage_of: global name -> the local stage whose backward completes its gradient.
        cross_stage_ties: parameters here that other pipeline ranks hold, too, each with one of
            those ranks, in a fixed order.
        materialize: allocates the parameters of these names that are on the meta device and gives
            them their starting values.
        buffer_records: of the modules here whose training forward updates buffers; none before
            `weft.parallel.model.recorded_buffers.with_records`.
        quantized: frozen matrices here that are held in 4 bits -> dim along which their blocks run.
        has_double_blocks: whether their scales are in 8 bits.
    """

    plan: Plan
    comm: Comm
    stages: Mapping[int, nn.ModuleDict]
    shards: Mapping[str, ParamShard]
    params: Mapping[str, nn.Parameter]
    stage_of: Mapping[str, int]
    cross_stage_ties: tuple[CrossStageTie, ...]
    materialize: Callable[[Sequence[str]], None] = lambda names: None
    buffer_records: BufferRecords = field(default_factory=BufferRecords)
    quantized: Mapping[str, int] = field(default_factory=dict)
    has_double_blocks: bool = False

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks that live here, by name."""
        found: dict[str, nn.Module] = {}
        for stage in self.stages.values():
            found.update(stage.items())
        return found

    @property
    def frozen(self) -> frozenset[str]:
        """Local parameters that receive no update; routers' biases, which are updated without a
        gradient, are not among them.
        """
        biases: set[int] = set()
        for block in self.blocks.values():
            for module in block.modules():
                if isinstance(module, Router):
                    biases.add(id(module.bias))
        frozen: set[str] = set()
        for name, param in self.params.items():
            if not param.requires_grad and id(param) not in biases:
                frozen.add(name)
        return frozenset(frozen)


def parallelize(
    model: Mapping[str, nn.Module] | nn.ModuleDict,
    plan: Plan,
    comm: Comm,
    *,
    axes: AxisTable | None = None,
    ties: Mapping[str, str] | None = None,
    example: Batch | None = None,
) -> ParallelModel:
    """This rank's part of `model`, an ordered mapping of block name -> plain module.

    The blocks of other stages are dropped, parameters are sharded as `axes` and the plan's rule
    say, and each dimension's transform is applied. Parameters on the meta device stay there until
    `materialize_params`; real ones keep their values.

    Args:
        model: blocks in order; the last one yields the summed loss. It is changed in place: pass a
            fresh one. Of `LazyBlocks` only those of this rank's stages are built, and one of each
            kind.
        axes: pattern of parameter names -> logical axis of each dim, see
            `weft.core.model_config.AxisTable`; default: the table of the plan's family, or nothing
            that could be sharded where the family is not one of weft's.
        ties: alias -> owner of tied parameters; parameters that are one object are tied without
            being named here.
        example: a micro-batch on the meta device, which tensor parallelism traces the model with;
            default: token ids of the plan's micro-batch size and sequence length.

    Raises:
        PlanError: a parameter that no row or two rows of `axes` match, or a model that would not
            compute on shards what it computes on one device.
    """
    keep_compiler_unimported()  # the example is on the meta device
    whole = _whole_model(model, plan, axes=axes, ties=ties or {})
    # Before anything is sharded or replaced below: transforms compare with what one device computes.
    chain = _plain_chain(whole, plan, comm, example)
    block_rank = _ranks_of_blocks(plan)
    here = comm.index(pipeline_axis())
    blocks = {name: model[name] for name, rank in block_rank.items() if rank == here}
    ties_here = ties_on_rank(whole.ties, blocks)
    tie(blocks, ties_here)
    _shard_parameters(blocks, plan, comm, axes=whole.axes)
    tie(blocks, ties_here)
    dropout = DropoutShards()
    partial = _apply_transforms(
        blocks,
        plan,
        comm,
        axes=whole.axes,
        sizes=_axis_lengths(whole.shapes, whole.axes),
        chain=chain,
        dropout=dropout,
    )
    use_chunked_losses(blocks, plan, device=comm.device.type)
    share_angles(blocks.values())
    if chain is not None and drops_out(blocks.values()):
        dropout.add_whole(chain, comm)
    # Before blocks are wrapped, so that names are those of the model's files.
    params = own_named_parameters(blocks, ties_here)
    if plan.compiles_blocks(comm.device.type):
        for name, block in blocks.items():
            drops = dropout.may_drop(name, block)
            blocks[name] = compiled_block(
                name, block, drops_out=drops, mode=plan.compile, recompute=plan.recompute_of[name]
            )
    dropping = {
        name: dropping_block(name, block, dropout, sharding_rank(comm))
        for name, block in blocks.items()
    }
    # Recomputation is outermost: what it repeats has to draw the same dropout, inside of it.
    stages = _stages_of(dropping, plan, rank=here, device=comm.device)
    shards: dict[str, ParamShard] = {}
    for name in params:
        shards[name] = _shard(
            name,
            whole.shapes[name],
            plan,
            comm,
            axes=whole.axes,
            owner=whole.ties.get(name, name),
            partial=_axes_with(partial, name),
        )
    return ParallelModel(
        plan=plan,
        comm=comm,
        stages=stages,
        shards=shards,
        params=params,
        stage_of=completing_stages(stages, params, plan.table.rows[here]),
        cross_stage_ties=cross_stage_ties_of(whole.ties, params, block_rank, here),
    )


@dataclass(frozen=True)
class _WholeModel:
    """All blocks of a model, before those of other stages are dropped.

    Attributes:
        repeats: name of a block -> name of an equal one that stands for it in `blocks`.
        ties: alias -> owner, those that are named and those that are one object.
        shapes: global name -> shape of each parameter.
        axes: pattern of parameter names -> logical axis of each dim.
    """

    blocks: Mapping[str, nn.Module] | nn.ModuleDict
    repeats: Mapping[str, str]
    ties: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    axes: AxisTable


def _whole_model(
    model: Mapping[str, nn.Module] | nn.ModuleDict,
    plan: Plan,
    *,
    axes: AxisTable | None,
    ties: Mapping[str, str],
) -> _WholeModel:
    """The blocks of `model` with their ties; of `LazyBlocks` one of each kind."""
    blocks: Mapping[str, nn.Module] | nn.ModuleDict = model
    repeats: Mapping[str, str] = {}
    if isinstance(model, LazyBlocks):
        tied_names = [*ties.keys(), *ties.values()]
        repeats = model.repeats(distinct=set(map(block_of, tied_names)))
        blocks = model.templates(repeats)
    all_ties = shared_parameters(blocks, repeats)
    all_ties.update(ties)
    tie(blocks, all_ties)
    params = named_parameters(blocks)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, param in params.items():
        shapes[name] = tuple(param.shape)
    return _WholeModel(
        blocks=blocks,
        repeats=repeats,
        ties=all_ties,
        shapes=shapes,
        axes=axes or _known_axes(plan, params),
    )


def _ranks_of_blocks(plan: Plan) -> dict[str, int]:
    """Pipeline rank of every block, in the order of the stages."""
    ranks: dict[str, int] = {}
    for stage, rank in zip(plan.stages, plan.table.stage_to_rank, strict=True):
        for name in stage.blocks:
            ranks[name] = rank
    return ranks


def _stages_of(
    blocks: Mapping[str, nn.Module], plan: Plan, *, rank: int, device: torch.device
) -> dict[int, nn.ModuleDict]:
    """The stages of a pipeline rank, with recomputation around their blocks."""
    modes = plan.recompute_of
    has_offload = "offload" in plan.recompute_policy.modes
    copying = host_copying(device) if has_offload else None
    stages: dict[int, nn.ModuleDict] = {}
    for number, stage in enumerate(plan.stages):
        if plan.table.stage_to_rank[number] != rank:
            continue
        own = {name: blocks[name] for name in stage.blocks}
        compiled = [name for name, block in own.items() if isinstance(block, CompiledBlock)]
        recomputed = recompute_blocks(own, modes, copying, compiled=compiled)
        stages[number] = nn.ModuleDict(recomputed)
    return stages


def _plain_chain(
    whole: _WholeModel, plan: Plan, comm: Comm, example: Batch | None
) -> ChainSnapshot | None:
    """The model before it is sharded, for a trace; None where no axis shards activations, or only
    positions of a model without dropout. Of compiled blocks it says which ones have dropout.
    """
    degree = comm.degree(activation_axes())
    has_columns = comm.degree(position_axes()) > 1
    needs_calls = has_columns or plan.compiles_blocks(comm.device.type)
    if degree == 1 and not (needs_calls and drops_out(dict(whole.blocks.items()).values())):
        return None
    if example is None:
        columns = plan.seq_len // comm.degree(position_axes())
        example = token_example(plan.micro_size, max(columns, 2 * degree))
    blocks = dict(whole.blocks.items())
    if plan.statistics_ranks > 1:
        take_parts(blocks)
    with ignoring_updates(blocks):
        return ChainSnapshot.of(blocks, example, whole.repeats)


def read_shard(read: Callable[[Box], Tensor], shard: Shard) -> Tensor:
    """The local tensor of a shard, from a function that yields the entries of one box."""
    tensors = list(map(read, shard.boxes))
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim=shard.dim)


def _shard_parameters(
    blocks: Mapping[str, nn.Module], plan: Plan, comm: Comm, *, axes: AxisTable
) -> None:
    """Replace each parameter by this rank's shard of it; one that is shared between modules stays
    shared.
    """
    shards: dict[int, nn.Parameter] = {}
    done: set[int] = set()
    replaced: list[nn.Parameter] = []  # keeps their ids
    for block_name, block in blocks.items():
        for path, param in list(block.named_parameters(remove_duplicate=False)):
            parent, _, leaf = path.rpartition(".")
            module = block.get_submodule(parent)
            key = id(param)
            if key in done or getattr(module, leaf) is not param:
                continue
            if key not in shards:
                name = f"{block_name}.{path}"
                shard = _sharded(name, param, plan, comm, axes=axes)
                shards[key] = shard
                replaced.append(param)
                done.add(id(shard))
            setattr(module, leaf, shards[key])


def _sharded(
    name: str, param: nn.Parameter, plan: Plan, comm: Comm, *, axes: AxisTable
) -> nn.Parameter:
    """This rank's shard of a parameter; the parameter itself where it is whole."""
    logical = logical_axes(name, axes)
    shape = tuple(param.shape)
    shard = shard_of(name, shape, logical, rule=plan.sharding_rule, mesh=plan.mesh, rank=comm.rank)
    if shard.shape == shape:
        return param
    whole = param.detach()
    local = read_shard(lambda box: whole[box.slices], shard).clone()
    return nn.Parameter(local, requires_grad=param.requires_grad)


def _apply_transforms(
    blocks: dict[str, nn.Module],
    plan: Plan,
    comm: Comm,
    *,
    axes: AxisTable,
    sizes: Mapping[str, int],
    chain: ChainSnapshot | None,
    dropout: DropoutShards,
) -> dict[str, frozenset[str]]:
    """Apply each dimension's transform: mesh axis -> names of parameters whose gradients are
    partial sums along it.
    """
    partial: dict[str, frozenset[str]] = {}
    for axis, dimension in dimensions().items():
        transform = dimension.load_transform()
        if transform is not None:
            names = transform(
                blocks,
                plan=plan,
                comm=comm,
                axes=axes,
                axis_sizes=sizes,
                chain=chain,
                dropout=dropout,
            )
            partial[axis] = frozenset(names)
    return partial


def _axes_with(partial: Mapping[str, frozenset[str]], name: str) -> tuple[str, ...]:
    """Mesh axes along which the gradient of this parameter is a partial sum."""
    axes: list[str] = []
    for axis, names in partial.items():
        if name in names:
            axes.append(axis)
    return tuple(axes)


def _known_axes(plan: Plan, params: Mapping[str, nn.Parameter]) -> AxisTable:
    if plan.family in FAMILIES:
        family = FAMILIES[plan.family]
        config = family.Config.model_validate_json(plan.architecture)
        return family.axes(config)
    table: dict[str, tuple[DimAxis, ...]] = {}
    for name, param in params.items():
        table[name] = ("whole",) * param.ndim
    return table


def _axis_lengths(shapes: Mapping[str, tuple[int, ...]], axes: AxisTable) -> dict[str, int]:
    """Length of each logical axis, as the parameters have it."""
    lengths: dict[str, int] = {}
    for name, shape in shapes.items():
        logical = logical_axes(name, axes)
        lengths.update(
            {
                axis: length
                for axis, length in zip(logical, shape, strict=True)
                if isinstance(axis, str)
            }
        )
    return lengths


def _shard(
    name: str,
    shape: tuple[int, ...],
    plan: Plan,
    comm: Comm,
    *,
    axes: AxisTable,
    owner: str,
    partial: tuple[str, ...],
) -> ParamShard:
    logical = logical_axes(name, axes)
    cut = sharding_axes(first_axes(logical), plan.sharding_rule, plan.mesh)
    varies = (*data_axes(plan.mesh), *partial)
    return ParamShard(
        name=name,
        owner=owner,
        shape=shape,
        shard=shard_of(
            name, shape, logical, rule=plan.sharding_rule, mesh=plan.mesh, rank=comm.rank
        ),
        shard_axes=cut,
        reduce_axes=gradient_axes(plan.mesh, varies=varies, sharded=cut),
        logical=logical,
    )
