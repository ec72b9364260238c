"""Trace of a tensor-parallel model on the meta device: where regions are entered and which gradients are partial sums.

See Note [Sharding trace] in sharding_mode.py and Note [Equal blocks].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.models.common.attention import Attend, overrides_forward
from weft.models.common.batch import Batch, Extra
from weft.models.common.layers import Loss, RegionInput
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.model.chain import replace_module
from weft.parallel.model.fingerprint import META, Fingerprint, TensorSpec, fingerprint
from weft.parallel.tensor.dims import DimFactor, Dims, ShardingError, is_sharded
from weft.parallel.tensor.sharding_mode import SEQ_DIM, Findings, ShardingTrace, Value
from weft.parallel.tensor.stand_ins import (
    SIZES_IN_REGION,
    TracedAttention,
    TracedEmbedding,
    TracedLoss,
    TracedRegion,
    TracedRegionInput,
    TracedRow,
)


@dataclass(frozen=True)
class ShardedModules:
    """Paths of the sharded modules below one block, by kind."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    embeddings: tuple[str, ...]
    regions: tuple[str, ...]


@dataclass(frozen=True)
class LocalParam:
    """A parameter as one rank holds it: local shape, and its dims."""

    shape: tuple[int, ...]
    dims: Dims


def trace_blocks(
    model: Mapping[str, nn.Module],
    kinds: Mapping[str, ShardedModules],
    params: Mapping[str, LocalParam],
    batch: Batch,
    *,
    degree: int,
    index: int,
    sequence_parallel: bool,
    records: dict[Hashable, BlockRecord] | None = None,
    repeats: Mapping[str, str] | None = None,
) -> Findings:
    """Run the chain of plain blocks on shards of one rank; see Note [Sharding trace].

    Args:
        model: the plain blocks, on the meta device.
        kinds: block name -> its sharded modules.
        params: global name -> what the rank holds.
        batch: an example, on the meta device.
        index: place of the rank along the axis.
        records: those of a trace of the same blocks for another index, to which this one adds.
        repeats: as in `PlainChain`.

    Raises:
        PlanError: a block that does not compute on shards what it computes on whole tensors.
    """
    chain = ChainTrace(
        model,
        kinds,
        params,
        ShardingTrace(degree=degree, sequence_parallel=sequence_parallel),
        {} if records is None else records,
        repeats or {},
    )
    x = batch.inputs
    with torch.inference_mode():
        for name, block in model.items():
            narrows = sequence_parallel and _embeds_positions(block, kinds[name])
            local = _local_positions(batch, chain.trace, index) if narrows else batch
            x = chain.run(name, x, local)
    return chain.trace.findings


@dataclass(frozen=True)
class BlockRecord:
    """What the trace of a block yielded, for blocks that equal it; see Note [Equal blocks].

    Attributes:
        name: of the block that was traced.
        findings: those of this block.
        shape, stride, dtype: of its result.
        value: of its result.
    """

    name: str
    findings: Findings
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    value: Value

    def result(self) -> Tensor:
        """A result like the one that was recorded."""
        return torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=META,
        )


class ChainTrace:
    """Trace of a chain of blocks, one after the other; equal blocks once.

    Note [Equal blocks]
        A block is not traced where an equal one was: the record of that one is repeated under its
        own name. Equal are blocks with the same fingerprint (fingerprint.py), the same sharded
        modules, local parameters and input. Only blocks whose forwards depend on nothing else are
        recorded:

            a parameter of another block, too     what is found depends on that block
            a forward that changes its module     the next one may depend on the change, through an
                                                  object that both hold: nothing is repeated after it
    """

    def __init__(
        self,
        model: Mapping[str, nn.Module],
        kinds: Mapping[str, ShardedModules],
        params: Mapping[str, LocalParam],
        trace: ShardingTrace,
        records: dict[Hashable, BlockRecord],
        repeats: Mapping[str, str],
    ) -> None:
        self.model = dict(model)
        self.kinds = kinds
        self.params = params
        self.trace = trace
        self._copies: dict[int, Any] = {}
        self._instrumented: dict[int, nn.Module] = {}
        self._repeats = repeats
        own_modules = {name: block for name, block in model.items() if name not in repeats}
        self._tied_blocks = _blocks_with_tied_params(own_modules)
        self._structures: dict[int, Fingerprint | None] = {}
        self._records = records
        self._is_stateless = True

    def run(self, name: str, x: Tensor, batch: Batch) -> Tensor:
        """What a block hands on."""
        key = self._key(name, x, batch)
        record = self._records.get(key) if key is not None else None
        if record is not None and self._is_stateless:
            return self._repeat(record, name)
        block = self._instrument(name)
        before = self._state(block, batch)
        with self.trace:
            x = _run(name, block, x, batch, self.trace)
        if before is None or self._state(block, batch) != before:
            self._is_stateless = False
        if key is not None and self._is_stateless and type(x) is Tensor:
            self._records[key] = BlockRecord(
                name=name,
                findings=self.trace.findings.of_block(name),
                shape=x.shape,
                stride=x.stride(),
                dtype=x.dtype,
                value=self.trace.value(x),
            )
        return x

    def _repeat(self, record: BlockRecord, name: str) -> Tensor:
        self.trace.findings.add(record.findings.renamed(record.name, name))
        return self.trace.set(record.result(), record.value)

    def _key(self, name: str, x: Tensor, batch: Batch) -> Hashable | None:
        """Equal for blocks whose traces are equal; None where that cannot be said."""
        if name in self._tied_blocks or type(x) is not Tensor:
            return None
        block = self.model[name]
        structure = self._structure(block)
        if structure is None:
            return None
        params = []
        for path, _ in block.named_parameters(remove_duplicate=False):
            params.append((path, self.params[f"{name}.{path}"]))
        x_facts = (TensorSpec.of(x), self.trace.value(x))
        return structure, self.kinds[name], tuple(params), x_facts, self._batch_facts(batch)

    def _structure(self, block: nn.Module) -> Fingerprint | None:
        """Of a plain block, which no trace changes."""
        if id(block) not in self._structures:
            self._structures[id(block)] = fingerprint(block)
        return self._structures[id(block)]

    def _batch_facts(self, batch: Batch) -> Hashable:
        facts: list[Hashable] = []
        for field_name, tensor in vars(batch).items():
            if tensor is not None:
                value = self.trace.value(tensor)
                facts.append((field_name, id(tensor), TensorSpec.of(tensor), value))
        return tuple(facts)

    def _state(self, block: nn.Module, batch: Batch) -> Hashable | None:
        """Equal before and after a forward that leaves its module and the batch as they were."""
        trace = self.trace

        def describe(tensor: Tensor) -> Hashable:
            return id(tensor), TensorSpec.of(tensor), trace.value(tensor)

        structure = fingerprint(block, describe, opaque=(trace,))
        return None if structure is None else (structure, self._batch_facts(batch))

    def _instrument(self, name: str) -> nn.Module:
        """A copy of the block on local parameters, with stand-ins for its sharded modules."""
        if name in self._repeats:
            self.model[name] = copy.deepcopy(self.model[name])
        block = self.model[name]
        if id(block) not in self._instrumented:  # a block may be used twice
            copied = _copied(name, block, self.params, self.trace, self._copies)
            self._instrumented[id(block)] = _instrumented(
                name, copied, self.kinds[name], self.trace
            )
        return self._instrumented[id(block)]


def _blocks_with_tied_params(model: Mapping[str, nn.Module]) -> frozenset[str]:
    """Blocks that hold a parameter of another block, too."""
    holders: dict[int, set[str]] = {}
    for name, block in model.items():
        for param in block.parameters():
            holders.setdefault(id(param), set()).add(name)
    tied: set[str] = set()
    for names in holders.values():
        if len(names) > 1:
            tied.update(names)
    return frozenset(tied)


def _embeds_positions(block: nn.Module, kinds: ShardedModules) -> bool:
    """Whether a block looks up embeddings of tokens, by a sharded vocabulary, and of positions."""
    others = (path for path, module in block.named_modules() if isinstance(module, nn.Embedding))
    return bool(kinds.embeddings) and any(path not in kinds.embeddings for path in others)


def _run(
    name: str,
    block: nn.Module,
    x: Tensor,
    batch: Batch,
    trace: ShardingTrace,
) -> Tensor:
    """What a block hands on."""
    trace.module = name
    trace.forget_readers()
    try:
        out = block(x, batch)
    except ShardingError as error:
        what = f"cannot be sharded over tp: {error}"
        raise PlanError(Fault(trace.module, what, fix=error.fix)) from None
    except PlanError:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        reason = first_line.rstrip(".!")
        what = f"cannot be sharded over tp: its forward fails on a rank's shards: {reason}"
        fix = _fix_of_failure(reason, sequence_parallel=trace.sequence_parallel)
        raise PlanError(Fault(trace.module, what, fix=fix)) from error
    x = out.x if isinstance(out, Extra) else out
    for tensor in tensors_in(x):  # a loss may read several
        value = trace.value(tensor)
        if value.params:
            trace.use(value.params, partial=value.varies)
        if not value.inside:
            trace.set(tensor, Value(value.dims, activation=tensor.is_floating_point()))
    return x


def _fix_of_failure(reason: str, *, sequence_parallel: bool) -> str:
    """What may be changed where torch rejects an operation on shards, by its message."""
    if "on device" in reason or "same device" in reason:
        return "create tensors on the device of an input: torch.arange(n, device=x.device)"
    if sequence_parallel:
        return f"{SIZES_IN_REGION}; check the axes of its parameters"
    return "take sizes from tensors, not from the config; check the axes of its parameters"


def _copied(
    name: str,
    block: nn.Module,
    params: Mapping[str, LocalParam],
    trace: ShardingTrace,
    copies: dict[int, Any],
) -> nn.Module:
    """A copy of a block with local parameters in place of whole ones.

    Args:
        copies: the copies of objects that blocks before this one hold, too, by id.
    """
    for path, param in block.named_parameters(remove_duplicate=False):
        if id(param) not in copies:
            param_name = f"{name}.{path}"
            copies[id(param)] = _local_copy(param_name, param, params[param_name], trace)
    return copy.deepcopy(block, copies)


def _local_copy(
    name: str,
    param: nn.Parameter,
    local: LocalParam,
    trace: ShardingTrace,
) -> nn.Parameter:
    data = torch.empty(local.shape, dtype=param.dtype, device=META)
    copied = nn.Parameter(data, requires_grad=False)
    if any(map(is_sharded, local.dims)):
        value = Value(local.dims, inside=True)
    else:
        value = Value(local.dims, params=frozenset({name}))
    trace.set(copied, value)
    return copied


def _instrumented(
    name: str,
    block: nn.Module,
    kinds: ShardedModules,
    trace: ShardingTrace,
) -> nn.Module:
    """The copied block, with stand-ins for its sharded modules."""
    for path, module in block.named_modules():
        module.register_forward_pre_hook(_locator(f"{name}.{path}".rstrip("."), trace))
    for path in kinds.columns:
        if any(path.startswith(f"{region}.") for region in kinds.regions):
            continue
        reader = _reader(f"{name}.{path}".rstrip("."), trace)
        block.get_submodule(path).register_forward_pre_hook(reader)
    for path in kinds.rows:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} was found to be a linear"
        block = replace_module(block, linear, TracedRow(linear, trace))
    for path in kinds.embeddings:
        embedding = block.get_submodule(path)
        assert isinstance(embedding, nn.Embedding), f"{path} was found to be an embedding"
        block = replace_module(block, embedding, TracedEmbedding(embedding, trace))
    for path, module in list(block.named_modules()):
        if isinstance(module, Attend) and not overrides_forward(module):
            module.implementation = TracedAttention(trace)
        elif isinstance(module, Loss):
            traced = TracedLoss(module, f"{name}.{path}".rstrip("."), trace)
            block = replace_module(block, module, traced)
        elif isinstance(module, RegionInput) and not any(
            path.startswith(f"{region}.") for region in kinds.regions
        ):
            block = replace_module(block, module, TracedRegionInput(trace))
    for path in kinds.regions:
        region = block.get_submodule(path)
        block = replace_module(block, region, TracedRegion(region, trace))
    return block


PreHook = Callable[[nn.Module, tuple[Any, ...]], Any]


def _reader(path: str, trace: ShardingTrace) -> PreHook:
    """A hook for a column-parallel linear."""

    def read(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        entered = trace.read(x, path)
        return (entered, *others)

    return read


def _locator(path: str, trace: ShardingTrace) -> PreHook:
    """A hook that notes where in the model an operation is."""

    def locate(_: nn.Module, __: tuple[Any, ...]) -> None:
        trace.module = path

    return locate


def _local_positions(batch: Batch, trace: ShardingTrace, index: int) -> Batch:
    """The batch with this rank's part of the positions, for the block that embeds tokens."""
    parts = batch.positions.chunk(trace.degree, SEQ_DIM)
    own = parts[index]
    batch_size, length = own.shape
    batch_dim = (DimFactor(batch_size),)
    sequence_dim = (DimFactor(length, sharded=True),)
    trace.set(own, Value((batch_dim, sequence_dim)))
    return replace(batch, positions=own)
