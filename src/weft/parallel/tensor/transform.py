"""The transform of the dimension tp: linears, embeddings and losses work on shards of heads, features and vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.axes import Rule, span_sizes
from weft.core.mesh import Mesh
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import DimAxis, Stacked, shard_of, sharded_over
from weft.errors import Fault, PlanError
from weft.layout.compilation import NOT_COMPILED
from weft.layout.plan import Plan
from weft.models.common.attention import Attend, OwnHeads
from weft.models.common.fp8_experts import share_expert_rows
from weft.models.common.init import named_parameters, path_below
from weft.models.common.layers import Loss, RegionHeads, RegionInput, RegionOutput
from weft.models.common.linear_products import share_rows
from weft.parallel.model.chain import ChainSnapshot, PlainChain, replace_module
from weft.parallel.model.dropout_blocks import DropoutShards
from weft.parallel.tensor.dims import DECLARE_AXES, Dim, DimFactor
from weft.parallel.tensor.instrument import LocalParam
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.tensor.region import SEQ_DIM, Region, SharedEntries
from weft.parallel.tensor.sharded_modules import ShardedModules, find_sharded_modules
from weft.parallel.tensor.sharding_mode import Findings, WholeSequence
from weft.parallel.tensor.trace import BlockRecord, trace_blocks
from weft.parallel.tensor.vocab import VocabParallelEmbedding, vocab_parallel_loss
from weft.parallel.tensor.width_statistics import compute_over_ranks
from weft.parallel.tp import AXIS

_trace_lock = threading.Lock()
"""Held during a trace: of two rank threads that traced at once one has ended in a segmentation fault,
in torch's own search for the rule of an operation.
"""


def transform(
    blocks: dict[str, nn.Module],
    *,
    plan: Plan,
    comm: Comm,
    axes: AxisTable,
    axis_sizes: Mapping[str, int],
    dropout: DropoutShards,
    chain: ChainSnapshot | None = None,
    **_unused: object,
) -> frozenset[str]:
    """Make the blocks tensor parallel; their parameters are sharded already.

    Args:
        dropout: takes how the tensors of dropout are sharded.
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
    dropout.add(regions.findings.dropout)
    made: dict[int, nn.Module] = {}
    for name, block in blocks.items():
        # by identity: `_make_parallel` replaces modules in place, so a block must not be made twice
        key = id(block)
        if key not in made:  # a block may be used twice
            first_name = regions.first_names[name]
            whole = regions.findings.whole.get(first_name)
            runs_as_written = name in NOT_COMPILED or dropout.may_drop(first_name, block)
            region = Region(
                comm,
                AXIS,
                plan.sequence_parallel and whole is None,
                overlaps=runs_as_written or not plan.compiles_blocks(comm.device.type),
                in_chunks=plan.tp_overlap,
            )
            made[key] = _make_parallel(
                first_name, block, regions.modules[first_name], regions.findings, region
            )
            if whole is not None:
                _work_on_whole_sequences(made[key], whole, comm)
    for name, block in blocks.items():
        blocks[name] = made[id(block)]
    vocab = axis_sizes.get("vocab", 0)
    _shard_losses(blocks, regions.findings, comm, vocab=vocab)
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
    snapshot: ChainSnapshot, plan: Plan, comm: Comm, *, axes: AxisTable
) -> ModelRegions:
    """The regions of a model, which are found once for all rank threads of a process."""

    def find() -> ModelRegions:
        return regions_of(snapshot.chain(), plan, axes=axes)

    if snapshot.fingerprint is None:
        return find()
    rows = tuple((pattern, tuple(row)) for pattern, row in axes.items())
    repeats = tuple(snapshot.repeats.items())
    key = (AXIS, plan, rows, snapshot.fingerprint, repeats)
    return comm.share_in_process(key, find)


def regions_of(chain: PlainChain, plan: Plan, *, axes: AxisTable) -> ModelRegions:
    """The regions of a model, by a trace.

    Raises:
        PlanError: a model that would not compute on shards what it computes on one device.
    """
    rule = plan.sharding_rule
    first_name_of: dict[int, str] = {}
    first_names: dict[str, str] = {}
    modules: dict[str, ShardedModules] = {}
    for name, block in chain.blocks.items():
        if name in chain.repeats:
            first_names[name] = name
        else:
            first_names[name] = first_name_of.setdefault(id(block), name)
        modules[name] = find_sharded_modules(name, block, axes=axes, rule=rule)
    try:
        findings = _trace(chain, modules, plan, axes=axes)
    except PlanError as error:
        if not plan.sequence_parallel or not _works_on_whole_sequences(chain, modules, plan, axes):
            raise
        raise PlanError(*map(_with_fix_of_whole_sequences, error.faults)) from error
    return ModelRegions(
        first_names=first_names,
        modules=modules,
        findings=findings,
        partial=_every_name(findings.partial, chain),
    )


def _works_on_whole_sequences(
    chain: PlainChain, modules: Mapping[str, ShardedModules], plan: Plan, axes: AxisTable
) -> bool:
    """Whether the trace of the same plan without sequence parallelism succeeds."""
    whole = plan.model_copy(update={"sequence_parallel": False})
    try:
        _trace(chain, modules, whole, axes=axes)
    except PlanError:
        return False
    return True


def _with_fix_of_whole_sequences(fault: Fault) -> Fault:
    fix = "--parallel.sequence False"
    if fault.fix != DECLARE_AXES:
        fix = f"{fault.fix}; or {fix}"
    return replace(fault, fix=fix)


def _trace(
    chain: PlainChain, modules: Mapping[str, ShardedModules], plan: Plan, *, axes: AxisTable
) -> Findings:
    """Findings of a trace on the shards of the first rank along tp; where the last one's shapes
    differ, of both.
    """
    degree = plan.mesh.degree(AXIS)
    of_first = _local_params(chain, plan, axes=axes, index=0)
    of_last = _local_params(chain, plan, axes=axes, index=degree - 1)
    records: dict[Hashable, BlockRecord] = {}

    def trace(
        params: Mapping[str, LocalParam], index: int, whole: Mapping[str, WholeSequence]
    ) -> Findings:
        with _trace_lock:
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
                whole=whole,
            )

    findings = trace(of_first, 0, {})
    if of_last == of_first:
        return findings
    while True:  # the ranks must agree on the blocks that work on whole sequences
        whole = findings.whole
        last = trace(of_last, degree - 1, whole)
        for path, widths in findings.statistics.items():
            of_last_rank = last.statistics.get(path, ())
            # a mean of means needs parts of equal lengths: `Width` takes the size from this rank's part
            if any(widths) and of_last_rank != widths:
                what = "is a norm over a width of which ranks along tp have parts of other lengths"
                raise PlanError(Fault(path, what, got=f"{widths}, {of_last_rank}"))
        if last.whole == whole:
            return findings
        # a block may work on whole sequences for the shapes of the last rank alone; both ranks must then
        findings = trace(of_first, 0, last.whole)


def _local_params(
    chain: PlainChain, plan: Plan, *, axes: AxisTable, index: int
) -> dict[str, LocalParam]:
    """Global name -> what the rank at `index` along tp holds, as if no other axis sharded
    parameters.
    """
    mesh = plan.mesh
    rule: Rule = {logical: axis for logical, axis in plan.sharding_rule.items() if axis == AXIS}
    coord = dict.fromkeys((name for name, _ in mesh.axes), 0)
    coord[AXIS] = index
    rank = mesh.rank(**coord)
    found: dict[str, LocalParam] = {}
    for name, param in named_parameters(chain.blocks).items():
        found[name] = _local_param(
            name, tuple(param.shape), logical_axes(name, axes), rule=rule, mesh=mesh, rank=rank
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
    dims: list[Dim] = []
    for place, axis in enumerate(logical):
        size = shard.shape[place]
        is_sharded = sharded_over(axis, rule) == AXIS
        parts: tuple[int, ...] = ()
        if is_sharded and isinstance(axis, Stacked) and len(axis.parts) > 1:
            parts = tuple(box.shape[place] for box in shard.boxes)
        factor = DimFactor(size, is_sharded, parts)
        dims.append((factor,))
    return LocalParam(shard.shape, tuple(dims))


class RegionEntry(nn.Module):
    """In place of a `RegionInput`: the region's entry, which hands their weights to the linears
    inside.
    """

    def __init__(
        self,
        region: Region,
        columns: tuple[ColumnParallelLinear, ...],
        readers: Collection[ColumnParallelLinear],
    ) -> None:
        """
        Args:
            readers: those of the columns that read the entry itself.
        """
        super().__init__()
        self.region = region
        self._columns = columns  # a tuple, so that they are no submodules
        self._multiplied = tuple(place for place, each in enumerate(columns) if each in readers)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's x -> the whole x."""
        weights = [column.weight for column in self._columns]
        entered, deferred = self.region.enter(x, weights, multiplied=self._multiplied)
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


class HeadsOfRank(nn.Module):
    """In place of a `RegionHeads`: the entries of a rank's heads."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor, dim: int, number: int) -> Tensor:
        """So many along `dim`, which has one for each head of all ranks."""
        return x.narrow(dim, number * self.region.comm.index(AXIS), number)


def _make_parallel(
    name: str, block: nn.Module, modules: ShardedModules, findings: Findings, region: Region
) -> nn.Module:
    """The block with parallel linears, embeddings and declared regions in place of plain ones."""
    entries = SharedEntries(region)
    columns: dict[str, ColumnParallelLinear] = {}
    for path in modules.columns:
        is_inside = path_below(name, path) in findings.inside_columns
        reads_inside = is_inside or modules.is_in_region(path)
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} was found to be a linear"
        column = ColumnParallelLinear.from_linear(linear, region, None if reads_inside else entries)
        columns[path] = column
        block = replace_module(block, linear, column)
    for path in modules.rows:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} was found to be a linear"
        row = RowParallelLinear.from_linear(linear, region)
        block = replace_module(block, linear, row)
    for path in modules.inner_rows:
        share_rows(block.get_submodule(path), largest_in=region.largest)
    for path, matrix, dim in modules.experts:
        share_expert_rows(block.get_submodule(path), matrix, region.largest, dim=dim)
    for path in modules.embeddings:
        embedding = block.get_submodule(path)
        assert isinstance(embedding, nn.Embedding), f"{path} was found to be an embedding"
        parallel = VocabParallelEmbedding.from_embedding(embedding, region)
        block = replace_module(block, embedding, parallel)
    for path, num_heads in findings.shared_heads.items():
        if path.startswith(f"{name}."):
            attend = block.get_submodule(path.removeprefix(f"{name}."))
            assert isinstance(attend, Attend), f"{path} was found to be attention"
            attend.own_heads = OwnHeads.of_rank(
                region.comm.index(AXIS), num_heads, total=num_heads * region.comm.degree(AXIS)
            )
    for path, widths in findings.statistics.items():
        if any(widths) and path.startswith(f"{name}."):
            norm = block.get_submodule(path.removeprefix(f"{name}."))
            compute_over_ranks(norm, widths, region)
    readers = {
        column
        for path, column in columns.items()
        if path_below(name, path) in findings.entry_columns
    }
    _make_regions(block, modules, columns, region, readers)
    _share_entries(name, block, entries, columns, findings)
    # tokens are looked up whole and their sum is scattered; positions are added after that
    if modules.embeddings and region.sequence_parallel:
        learns_positions = any(isinstance(module, nn.Embedding) for module in block.modules())
        if learns_positions:
            block.register_forward_pre_hook(_local_positions(region.comm), prepend=True)
    return block


def _make_regions(
    block: nn.Module,
    modules: ShardedModules,
    columns: Mapping[str, ColumnParallelLinear],
    region: Region,
    readers: Collection[ColumnParallelLinear],
) -> None:
    """Replace the declared ends of regions by the region's own."""
    for path, module in list(block.named_modules()):
        parent = path.rpartition(".")[0]
        is_declared = parent in modules.regions
        if isinstance(module, RegionInput) and (is_declared or modules.columns):
            inside = _columns_inside(parent, columns)
            replace_module(block, module, RegionEntry(region, inside, readers))
        elif isinstance(module, RegionHeads) and modules.columns:
            replace_module(block, module, HeadsOfRank(region))
        elif isinstance(module, RegionOutput) and is_declared:
            replace_module(block, module, RegionExit(region))


def _columns_inside(
    parent: str, columns: Mapping[str, ColumnParallelLinear]
) -> tuple[ColumnParallelLinear, ...]:
    """The linears below a module that read what is inside a region already."""
    prefix = f"{parent}." if parent else ""
    inside: list[ColumnParallelLinear] = []
    for path, column in columns.items():
        if path.startswith(prefix) and column.entries is None:
            inside.append(column)
    return tuple(inside)


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
    for path, column in columns.items():
        paths = findings.entries.get(path_below(name, path), [])
        own_paths = [reader.removeprefix(name).removeprefix(".") for reader in paths]
        column.readers = tuple(columns[own_path] for own_path in own_paths)
    if any(column.readers for column in columns.values()):
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


def _work_on_whole_sequences(block: nn.Module, how: WholeSequence, comm: Comm) -> None:
    """All-gather the input of a block, and hand on this rank's part of its output; the gradients go
    the other way. See Note [Whole sequences].
    """

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        return ops.gather_from_region(x, comm, AXIS, SEQ_DIM), *others

    def split(_: nn.Module, _args: tuple[Any, ...], out: Tensor) -> Tensor:
        return ops.scatter_to_region(out, comm, AXIS, SEQ_DIM)

    if how.is_gathered:
        block.register_forward_pre_hook(gather, prepend=True)
    if how.is_split:
        block.register_forward_hook(split)


def _shard_losses(
    blocks: dict[str, nn.Module], findings: Findings, comm: Comm, *, vocab: int
) -> None:
    """Replace the `Loss` of logits that are sharded along the vocabulary, as a block or inside one."""
    sizes = span_sizes(vocab, comm.degree(AXIS))
    for name, block in blocks.items():
        for path, module in list(block.named_modules()):
            key = path_below(name, path)
            num_entries = findings.sharded_losses.get(key)
            if num_entries is None:
                continue
            if num_entries != sizes[0]:
                fault = Fault(
                    key,
                    "its logits are not sharded as the vocabulary is",
                    got=f"{num_entries} entries on the first rank",
                    need=f"{sizes[0]}",
                )
                raise PlanError(fault)
            loss = cast(Loss, module)
            parallel = vocab_parallel_loss(loss, vocab, comm=comm, key=key)
            blocks[name] = replace_module(block, module, parallel)


def _every_name(partial: frozenset[str], chain: PlainChain) -> frozenset[str]:
    """The names of these parameters, tied ones under each name."""
    params = named_parameters(chain.blocks)

    def identity(name: str) -> tuple[str, int]:
        block_name = name.partition(".")[0]
        scope = block_name if block_name in chain.repeats else ""
        return scope, id(params[name])

    partial_ids = set(map(identity, partial))
    names = [name for name in params if identity(name) in partial_ids]
    return frozenset(names)
