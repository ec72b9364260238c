"""The transform of the dimension tp: linears, embeddings and losses work on shards of heads, features and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import Rule, span_sizes
from weft.core.mesh import Mesh
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import DimAxis, Stacked, shard_of, sharded_over
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.models.common.batch import drop_batch
from weft.models.common.init import named_parameters
from weft.models.common.layers import Loss, RegionInput, RegionOutput
from weft.models.common.lora import LoraLinear
from weft.parallel.model.chain import ChainSnapshot, PlainChain, replace_module
from weft.parallel.tensor.dims import DimFactor, Dims
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.tensor.region import SEQ_DIM, Region, SharedEntries
from weft.parallel.tensor.sharding_mode import Findings
from weft.parallel.tensor.trace import (
    BlockRecord,
    LocalParam,
    ShardedModules,
    trace_blocks,
)
from weft.parallel.tensor.vocab import VocabParallelEmbedding, vocab_parallel_loss
from weft.parallel.tp import AXIS

LINEARS = (nn.Linear, LoraLinear)
"""Classes of linears that the parallel ones stand for; a subclass of the user's may compute
something else.
"""


def transform(
    blocks: dict[str, nn.Module],
    *,
    plan: Plan,
    comm: Comm,
    axes: AxisTable,
    axis_sizes: Mapping[str, int],
    chain: ChainSnapshot | None = None,
    **_unused: object,
) -> frozenset[str]:
    """Make the blocks tensor parallel; their parameters are sharded already.

    Args:
        chain: the whole model before it was sharded, for the trace; see Note [Sharding trace].

    Returns the names of the parameters whose gradients are partial sums over tp: those used inside
    a tensor-parallel region and, with sequence parallelism, those used outside of it, too.

    Raises:
        PlanError: a model that would not compute on shards what it computes on one device.
    """
    if comm.degree(AXIS) == 1:
        return frozenset()
    assert chain is not None, "parallelize passes the chain where an axis shards activations"
    regions = _find_regions(chain, plan, comm, axes=axes)
    region = Region(comm, AXIS, plan.sequence_parallel)
    done: set[int] = set()
    for name, block in list(blocks.items()):
        if id(block) not in done:  # a block may be used twice
            done.add(id(block))
            first_name = regions.first_names[name]
            modules = regions.modules[first_name]
            made = _make_parallel(first_name, block, modules, regions.findings, region)
            for other, same in blocks.items():
                if same is block:
                    blocks[other] = made
    _shard_losses(blocks, regions.findings, comm, vocab=axis_sizes.get("vocab", 0))
    return regions.partial


@dataclass(frozen=True)
class ModelRegions:
    """Where the tensor-parallel regions of a whole model are; equal on all ranks, not to be changed.

    Attributes:
        first_names: name of a block -> the first name of that block, which may be used twice.
        modules: name of a block -> its sharded modules.
        findings: of the trace, which knows a block by its first name.
        partial: parameters whose gradients are partial sums.
    """

    first_names: Mapping[str, str]
    modules: Mapping[str, ShardedModules]
    findings: Findings
    partial: frozenset[str]


def _find_regions(
    snapshot: ChainSnapshot,
    plan: Plan,
    comm: Comm,
    *,
    axes: AxisTable,
) -> ModelRegions:
    """The regions of a model, which are found once for all rank threads of a process."""

    def find() -> ModelRegions:
        chain = snapshot.chain()
        rule = plan.sharding_rule
        first_names: dict[int, str] = {}
        modules: dict[str, ShardedModules] = {}
        for name, block in chain.blocks.items():
            if name not in chain.repeats:
                first_names.setdefault(id(block), name)
            modules[name] = find_sharded_modules(name, block, axes=axes, rule=rule)
        findings = _trace(chain, modules, plan, axes=axes)
        return ModelRegions(
            first_names={
                name: name if name in chain.repeats else first_names[id(block)]
                for name, block in chain.blocks.items()
            },
            modules=modules,
            findings=findings,
            partial=_every_name(findings.partial, chain),
        )

    if snapshot.fingerprint is None:
        return find()
    rows = tuple((pattern, tuple(row)) for pattern, row in axes.items())
    repeats = tuple(snapshot.repeats.items())
    return comm.share_in_process((AXIS, plan, rows, snapshot.fingerprint, repeats), find)


def _trace(
    chain: PlainChain,
    modules: Mapping[str, ShardedModules],
    plan: Plan,
    *,
    axes: AxisTable,
) -> Findings:
    """Findings of a trace on the shards of the first rank along tp; where the last one's shapes
    differ, of both.
    """
    degree = plan.mesh.degree(AXIS)
    of_first = _local_params(chain, plan, axes=axes, index=0)
    of_last = _local_params(chain, plan, axes=axes, index=degree - 1)
    records: dict[Hashable, BlockRecord] = {}

    def trace(params: Mapping[str, LocalParam], index: int) -> Findings:
        return trace_blocks(
            chain.blocks,
            modules,
            params,
            chain.batch,
            degree=degree,
            index=index,
            sequence_parallel=plan.sequence_parallel,
            records=records,
            repeats=chain.repeats,
        )

    findings = trace(of_first, 0)
    if of_last != of_first:
        trace(of_last, degree - 1)
    return findings


def _local_params(
    chain: PlainChain,
    plan: Plan,
    *,
    axes: AxisTable,
    index: int,
) -> dict[str, LocalParam]:
    """Global name -> what the rank at `index` along tp holds, as if no other axis sharded
    parameters.
    """
    rule: Rule = {logical: axis for logical, axis in plan.sharding_rule.items() if axis == AXIS}
    coord = dict.fromkeys((name for name, _ in plan.mesh.axes), 0)
    coord[AXIS] = index
    rank = plan.mesh.rank(**coord)
    found = {}
    for name, param in named_parameters(chain.blocks).items():
        logical = logical_axes(name, axes)
        found[name] = _local_param(
            name,
            tuple(param.shape),
            logical,
            rule=rule,
            mesh=plan.mesh,
            rank=rank,
        )
    return found


def _local_param(
    name: str,
    shape: tuple[int, ...],
    logical: tuple[DimAxis, ...],
    *,
    rule: Rule,
    mesh: Mesh,
    rank: int,
) -> LocalParam:
    shard = shard_of(name, shape, logical, rule=rule, mesh=mesh, rank=rank)
    dims: Dims = ()
    for place, (axis, size) in enumerate(zip(logical, shard.shape, strict=True)):
        is_sharded = sharded_over(axis, rule) == AXIS
        is_stacked = is_sharded and isinstance(axis, Stacked)
        parts = tuple(box.shape[place] for box in shard.boxes) if is_stacked else ()
        dims = (*dims, (DimFactor(size, is_sharded, parts),))
    return LocalParam(shard.shape, dims)


def find_sharded_modules(
    name: str,
    block: nn.Module,
    *,
    axes: AxisTable,
    rule: Rule,
) -> ShardedModules:
    """The modules below a plain block that hold sharded parameters, by what becomes of them.

    Raises:
        PlanError: a linear sharded along both dims, an embedding sharded along its features, or a
            subclass of them.
    """
    columns, rows, embeddings, regions = [], [], [], []
    for path, module in block.named_modules():
        key = f"{name}.{path}.weight" if path else f"{name}.weight"
        has_weight = module._parameters.get("weight") is not None  # a parametrized one has none
        if isinstance(module, nn.Linear) and has_weight:
            out_axis, in_axis = logical_axes(key, axes)
            is_column = sharded_over(out_axis, rule) == AXIS
            is_row = sharded_over(in_axis, rule) == AXIS
            if is_column and is_row:
                raise PlanError(
                    Fault(key, "sharded along both dims over tp", got=f"{out_axis}, {in_axis}")
                )
            if is_column or is_row:
                _check_class(module, LINEARS, key)
            if is_column:
                columns.append(path)
            if is_row:
                rows.append(path)
        elif isinstance(module, nn.Embedding):
            row_axis, feature_axis = logical_axes(key, axes)
            if sharded_over(feature_axis, rule) == AXIS:
                raise PlanError(
                    Fault(
                        key,
                        "an embedding cannot be sharded along its features",
                        got=str(feature_axis),
                    )
                )
            if sharded_over(row_axis, rule) == AXIS:
                _check_class(module, (nn.Embedding,), key)
                _check_options(module, key)
                embeddings.append(path)
        elif _declares_region(module) and _holds_sharded(
            key.removesuffix("weight"),
            module,
            axes=axes,
            rule=rule,
        ):
            regions.append(path)
    rows = [path for path in rows if not any(path.startswith(f"{region}.") for region in regions)]
    return ShardedModules(tuple(columns), tuple(rows), tuple(embeddings), tuple(regions))


def _declares_region(module: nn.Module) -> bool:
    return any(isinstance(child, RegionOutput) for child in module.children())


def _holds_sharded(
    prefix: str,
    module: nn.Module,
    *,
    axes: AxisTable,
    rule: Rule,
) -> bool:
    for path, _ in module.named_parameters():
        for axis in logical_axes(f"{prefix}{path}", axes):
            if sharded_over(axis, rule) == AXIS:
                return True
    return False


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold hooks which its calls run."""


def _check_class(
    module: nn.Module,
    known: tuple[type[nn.Module], ...],
    key: str,
) -> None:
    """Reject a module that computes something else than the parallel one in its place would."""
    forwards = {cls.forward for cls in known}
    class_name = known[0].__name__
    if type(module).forward not in forwards or "forward" in vars(module):
        what = f"{type(module).__name__} overrides {class_name}.forward, and a parallel one would replace it"
        fix = f"use nn.{class_name}, or name axes that are not sharded"
        raise PlanError(Fault(key, what, fix=fix))
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    if any(hook is not drop_batch for hook in hooks):
        what = (
            f"this {class_name} has hooks, and the parallel one that replaces it would not run them"
        )
        fix = "register them on the module around it, or name axes that are not sharded"
        raise PlanError(Fault(key, what, fix=fix))


def _check_options(module: nn.Embedding, key: str) -> None:
    options = {"padding_idx": module.padding_idx, "max_norm": module.max_norm}
    given = [option for option, value in options.items() if value is not None]
    if given or module.scale_grad_by_freq or module.sparse:
        what = "a vocabulary-parallel embedding supports none of padding_idx, max_norm, scale_grad_by_freq, sparse"
        raise PlanError(Fault(key, what, got=", ".join(given) or "scale_grad_by_freq or sparse"))


class RegionEntry(nn.Module):
    """In place of a `RegionInput`: the region's entry, which hands their weights to the linears
    inside.
    """

    def __init__(self, region: Region, columns: tuple[ColumnParallelLinear, ...]) -> None:
        super().__init__()
        self.region = region
        self._columns = columns  # a tuple, so that they are no submodules

    def forward(self, x: Tensor) -> Tensor:
        """This rank's x -> the whole x."""
        entered, deferred = self.region.enter(x, [column.weight for column in self._columns])
        for column, weight in zip(self._columns, deferred, strict=True):
            column.deferred = weight
        return entered


class RegionExit(nn.Module):
    """In place of a `RegionOutput`: the sum over the region's ranks."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, y: Tensor) -> Tensor:
        """A partial y -> the sum; with sequence parallelism this rank's part of the sequence."""
        return self.region.leave(y)


def _make_parallel(
    name: str,
    block: nn.Module,
    modules: ShardedModules,
    findings: Findings,
    region: Region,
) -> nn.Module:
    """The block with parallel linears, embeddings and declared regions in place of plain ones."""
    entries = SharedEntries(region)
    columns: dict[str, ColumnParallelLinear] = {}
    for path in modules.columns:
        in_region = any(path.startswith(f"{declared}.") for declared in modules.regions)
        is_inside = in_region or f"{name}.{path}".rstrip(".") in findings.inside_columns
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} was found to be a linear"
        columns[path] = ColumnParallelLinear.from_linear(
            linear, region, None if is_inside else entries
        )
        block = replace_module(block, linear, columns[path])
    for path in modules.rows:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} was found to be a linear"
        block = replace_module(block, linear, RowParallelLinear.from_linear(linear, region))
    for path in modules.embeddings:
        embedding = block.get_submodule(path)
        assert isinstance(embedding, nn.Embedding), f"{path} was found to be an embedding"
        parallel = VocabParallelEmbedding.from_embedding(embedding, region)
        block = replace_module(block, embedding, parallel)
    _make_regions(block, modules, columns, region)
    _share_entries(name, block, entries, columns, findings)
    learns_positions = any(isinstance(module, nn.Embedding) for module in block.modules())
    if modules.embeddings and region.sequence_parallel and learns_positions:
        block.register_forward_pre_hook(_local_positions(region.comm), prepend=True)
    return block


def _make_regions(
    block: nn.Module,
    modules: ShardedModules,
    columns: Mapping[str, ColumnParallelLinear],
    region: Region,
) -> None:
    for path, module in list(block.named_modules()):
        prefix = path.rpartition(".")[0]
        is_unused = prefix not in modules.regions and not modules.columns
        if isinstance(module, RegionInput) and not is_unused:
            inside = (
                column
                for name, column in columns.items()
                if name.startswith(f"{prefix}." if prefix else "") and column.entries is None
            )
            replace_module(block, module, RegionEntry(region, tuple(inside)))
        elif isinstance(module, RegionOutput) and prefix in modules.regions:
            replace_module(block, module, RegionExit(region))


def _share_entries(
    name: str,
    block: nn.Module,
    entries: SharedEntries,
    columns: Mapping[str, ColumnParallelLinear],
    findings: Findings,
) -> None:
    """Tell the block's entries which linears read the same tensor; drop what is left of them when
    its forward ends.
    """
    readers: dict[int, list[ColumnParallelLinear]] = {}
    for path, column in columns.items():
        paths = findings.entries.get(f"{name}.{path}" if path else name, [])
        if paths:
            own = [reader.removeprefix(name).removeprefix(".") for reader in paths]
            readers[id(column)] = [columns[reader] for reader in own]
    entries.readers = readers
    if readers:
        block.register_forward_hook(lambda *_: entries.clear(), always_call=True)


def _local_positions(comm: Comm) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook for the block that embeds tokens: it gets all tokens (their embeddings are
    reduce-scattered), but only this rank's positions."""
    degree = comm.degree(AXIS)
    index = comm.index(AXIS)

    def narrow(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, batch = args  # before `drop_batch`
        parts = batch.positions.chunk(degree, SEQ_DIM)
        local_batch = replace(batch, positions=parts[index])
        return x, local_batch

    return narrow


def _shard_losses(
    blocks: dict[str, nn.Module],
    findings: Findings,
    comm: Comm,
    *,
    vocab: int,
) -> None:
    """Replace the `Loss` of logits that are sharded along the vocabulary, as a block or inside one."""
    for name, block in blocks.items():
        for path, module in list(block.named_modules()):
            key = f"{name}.{path}".rstrip(".")
            if key not in findings.sharded_losses:
                continue
            first_length = span_sizes(vocab, comm.degree(AXIS))[0]
            if findings.sharded_losses[key] != first_length:
                got = f"{findings.sharded_losses[key]} entries on the first rank"
                raise PlanError(
                    Fault(
                        key,
                        "its logits are not sharded as the vocabulary is",
                        got,
                        f"{first_length}",
                    )
                )
            parallel = vocab_parallel_loss(cast(Loss, module), vocab, comm=comm, key=key)
            blocks[name] = replace_module(block, module, parallel)


def _every_name(partial: frozenset[str], chain: PlainChain) -> frozenset[str]:
    """The names of these parameters, tied ones under each name."""
    params = named_parameters(chain.blocks)

    def identity(name: str) -> tuple[str, int]:
        block_name = name.partition(".")[0]
        scope = block_name if block_name in chain.repeats else ""
        return scope, id(params[name])

    partial_ids = {identity(name) for name in partial}
    names = [name for name in params if identity(name) in partial_ids]
    return frozenset(names)
