"""Trace of a tensor-parallel model on the meta device: where regions are entered and which gradients are partial sums.

See Note [Sharding trace] in sharding_mode.py and Note [Equal blocks].
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError, first_line
from weft.models.common.batch import Batch, activation_of
from weft.models.common.buffer_updates import noted_updates
from weft.models.common.dropout_mode import CallShards
from weft.models.common.init import path_below
from weft.models.common.layers import Loss
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.model.chain import MAY_GATHER
from weft.parallel.model.dropout_blocks import NotedDropout
from weft.parallel.model.fingerprint import META, Fingerprint, TensorSpec, fingerprint
from weft.parallel.model.module_copy import copied_module
from weft.parallel.tensor.dims import DECLARE_AXES, DimFactor, ShardingError, whole_dim
from weft.parallel.tensor.dropout_dims import call_shards
from weft.parallel.tensor.instrument import LocalParam, instrument, local_block
from weft.parallel.tensor.region import SEQ_DIM
from weft.parallel.tensor.sharded_modules import ShardedModules
from weft.parallel.tensor.sharded_sizes import SizesOfShards
from weft.parallel.tensor.sharding_mode import Findings, ShardingTrace, Value, WholeSequence
from weft.parallel.tensor.stand_ins import SIZES_IN_REGION
from weft.parallel.tensor.width_statistics import StatisticsMode

UNSHARDED_INPUT = (
    "it has no parameters, so its input must be whole: in AXES name None instead of the sharded "
    "axis ('vocab') in the block before it, and in parameters tied to that"
)
WHOLE_UPDATES = "name axes that are not sharded, or hand over values that every rank has"
DROPOUT_IN_REGION = "no dropout there (of adapters: other lora.targets), or a mesh without tp"
COMPILED = "torch._dynamo.eval_frame"
"""Module that defines the class of what `torch.compile` makes of a module."""


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
    whole: Mapping[str, WholeSequence] | None = None,
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
        whole: blocks that work on whole sequences, as another trace has found.

    Raises:
        PlanError: a block that does not compute on shards what it computes on whole tensors.
    """
    trace = ShardingTrace(degree=degree, sequence_parallel=sequence_parallel)
    chain = ChainTrace(
        model, kinds, params, trace, {} if records is None else records, repeats or {}
    )
    x = batch.inputs
    following = [*list(model.values())[1:], None]
    with torch.inference_mode():
        for (name, block), next_block in zip(model.items(), following, strict=True):
            local_batch = batch
            if sequence_parallel and _looks_up_tokens_and_positions(block, kinds[name]):
                local_batch = _local_positions(batch, trace, index)
            known = (whole or {}).get(name)
            if known is None:
                before = copy.deepcopy(trace.findings)
                may_gather = sequence_parallel and getattr(block, MAY_GATHER, False)
                feeds_loss = next_block is not None and _has_loss(next_block)
                try:
                    out = chain.run(name, x, local_batch)
                    if may_gather and trace.has_parts(out) == feeds_loss:
                        raise PlanError(Fault(name, PARTS_OF_LOGITS if feeds_loss else NO_PARTS))
                    x = out
                    continue
                except PlanError as error:
                    if not may_gather:
                        raise
                    reason = str(error.faults[0]).partition(" Fix: ")[0]
                trace.findings = before
                known = WholeSequence(
                    reason, is_gathered=trace.has_parts(x), is_split=not feeds_loss
                )
            if known.is_gathered:
                x = trace.gathered(x)
            with trace.on_whole_sequences():
                x = chain.run(name, x, batch)
            if known.is_split:
                x = trace.split(x)
            trace.findings.whole[name] = known
    return trace.findings


NO_PARTS = "its embeddings are not sharded, and each rank takes its part of them"
PARTS_OF_LOGITS = "its logits are not sharded, and the loss reads those of whole sequences"


def _has_loss(block: nn.Module) -> bool:
    return any(isinstance(module, Loss) for module in block.modules())


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
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


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
        own_blocks: dict[str, nn.Module] = {
            name: block for name, block in model.items() if name not in repeats
        }
        self._tied_blocks = _blocks_with_tied_params(own_blocks)
        self._structures: dict[int, Fingerprint | None] = {}
        self._records = records
        self._is_stateless = True

    def run(self, name: str, x: Tensor, batch: Batch) -> Tensor:
        """What a block hands on."""
        key = self._key(name, x, batch)
        if key is not None and self._is_stateless:
            record = self._records.get(key)
            if record is not None:
                return self._repeat(record, name)
        block = self._instrument(name)
        before = self._state(block, batch)
        calls: list[CallShards] = []

        def note(tensor: Tensor) -> None:
            if self.trace.is_paused:
                raise ShardingError(
                    "dropout inside a region whose both ends are declared, where tensors are not followed",
                    fix=DROPOUT_IN_REGION,
                )
            dims = self.trace.value(tensor).dims
            calls.append(call_shards(dims, len(batch.inputs)))

        updates = noted_updates(block, self._check_update)
        sizes, statistics = SizesOfShards(self.trace), StatisticsMode(self.trace.width_of)
        with NotedDropout(name, note), updates, self.trace, sizes, statistics:
            x = _run(name, block, x, batch, self.trace)
        self.trace.findings.dropout[name] = tuple(calls)
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

    def _check_update(self, values: tuple[Tensor, ...]) -> None:
        """Reject values for buffers of which a rank has a part: its buffers would be others."""
        if any(self.trace.value(value).sharded for value in values):
            raise ShardingError(
                "a sharded value is handed to weft.update_buffers", fix=WHOLE_UPDATES
            )

    def _repeat(self, record: BlockRecord, name: str) -> Tensor:
        findings = record.findings.renamed(record.name, name)
        self.trace.findings.add(findings)
        result = record.result()
        return self.trace.set(result, record.value)

    def _key(self, name: str, x: Tensor, batch: Batch) -> Hashable | None:
        """Equal for blocks whose traces are equal; None where that cannot be said."""
        if name in self._tied_blocks or type(x) is not Tensor:
            return None
        block = self.model[name]
        structure = self._structure(block)
        if structure is None:
            return None
        params: list[tuple[str, LocalParam]] = []
        for path, _ in block.named_parameters(remove_duplicate=False):
            local = self.params[f"{name}.{path}"]
            params.append((path, local))
        return (
            structure,
            self.trace.sequence_parallel,
            self.kinds[name],
            tuple(params),
            TensorSpec.of(x),
            self.trace.value(x),
            self._batch_facts(batch),
        )

    def _structure(self, block: nn.Module) -> Fingerprint | None:
        """The fingerprint of a plain block, which no trace changes; None for others."""
        key = id(block)
        if key not in self._structures:
            self._structures[key] = fingerprint(block)
        return self._structures[key]

    def _batch_facts(self, batch: Batch) -> Hashable:
        facts: list[Hashable] = []
        for field_name, tensor in batch.tensors().items():
            of_tensor = self._tensor_facts(tensor)
            facts.append((field_name, of_tensor))
        return tuple(facts)

    def _tensor_facts(self, tensor: Tensor) -> Hashable:
        """Equal for the same tensor, as long as nothing changes it."""
        spec = TensorSpec.of(tensor)
        value = self.trace.value(tensor)
        return id(tensor), spec, value

    def _state(self, block: nn.Module, batch: Batch) -> Hashable | None:
        """Equal before and after a forward that leaves its module and the batch as they were."""
        structure = fingerprint(block, self._tensor_facts, opaque=(self.trace,))
        if structure is None:
            return None
        return structure, self._batch_facts(batch)

    def _instrument(self, name: str) -> nn.Module:
        """A copy of the block on local parameters, with stand-ins for its sharded modules."""
        if name in self._repeats:
            self.model[name] = copied_module(self.model[name], {})
        block = self.model[name]
        key = id(block)
        _reject_compiled(name, block)
        if key not in self._instrumented:  # a block may be used twice
            copied = local_block(name, block, self.params, self.trace, self._copies)
            kinds = self.kinds[name]
            self._instrumented[key] = instrument(name, copied, kinds, self.trace)
        return self._instrumented[key]


def _reject_compiled(name: str, block: nn.Module) -> None:
    for path, module in block.named_modules():
        if type(module).__module__ == COMPILED:
            raise PlanError(
                Fault(
                    path_below(name, path),
                    "is compiled, and tensor parallelism would change the modules inside",
                    fix="no torch.compile around modules, or a mesh without tp",
                )
            )


def _blocks_with_tied_params(model: Mapping[str, nn.Module]) -> frozenset[str]:
    """Blocks that hold a parameter of another block, too."""
    holders: dict[int, set[str]] = {}
    for name, block in model.items():
        for param in block.parameters():
            names = holders.setdefault(id(param), set())
            names.add(name)
    tied: set[str] = set()
    for names in holders.values():
        if len(names) > 1:
            tied.update(names)
    return frozenset(tied)


def _looks_up_tokens_and_positions(block: nn.Module, kinds: ShardedModules) -> bool:
    """Whether a block looks up embeddings of tokens, by a sharded vocabulary, and of positions."""
    if not kinds.embeddings:
        return False
    embeddings: list[str] = []
    for path, module in block.named_modules():
        if isinstance(module, nn.Embedding):
            embeddings.append(path)
    return not set(embeddings).issubset(kinds.embeddings)


def _run(name: str, block: nn.Module, x: Tensor, batch: Batch, trace: ShardingTrace) -> Tensor:
    """What a block hands on."""
    trace.module = name
    trace.forget_readers()
    try:
        out = block(x, batch)
    except ShardingError as error:
        what = f"cannot be sharded over tp: {error}"
        fix = _fix_of_sharding(error, block)
        raise PlanError(Fault(trace.module, what, fix=fix)) from None
    except PlanError:
        raise
    except Exception as error:
        reason = first_line(error).rstrip(".!")
        what = f"cannot be sharded over tp: its forward fails on a rank's shards: {reason}"
        fix = _fix_of_failure(reason, sequence_parallel=trace.sequence_parallel)
        raise PlanError(Fault(trace.module, what, fix=fix)) from error
    handed_on: Tensor = activation_of(out)
    for tensor in tensors_in(handed_on):  # a loss may read several
        value = trace.value(tensor)
        if value.params:
            trace.use(value.params, partial=value.varies)
        if not value.inside:
            trace.set(tensor, Value(value.dims, activation=tensor.is_floating_point()))
    return handed_on


def _fix_of_sharding(error: ShardingError, block: nn.Module) -> str:
    """What may be changed where an operation has no rule for shards."""
    has_params = next(block.parameters(), None) is not None
    if error.fix == DECLARE_AXES and not has_params:
        return UNSHARDED_INPUT
    return error.fix


def _fix_of_failure(reason: str, *, sequence_parallel: bool) -> str:
    """What may be changed where torch rejects an operation on shards, by its message."""
    if "on device" in reason or "same device" in reason:
        return "create tensors on the device of an input: torch.arange(n, device=x.device)"
    if sequence_parallel:
        return f"{SIZES_IN_REGION}; check the axes of its parameters"
    return "take sizes from tensors, not from the config; check the axes of its parameters"


def _local_positions(batch: Batch, trace: ShardingTrace, index: int) -> Batch:
    """The batch with this rank's part of the positions, for the block that embeds tokens."""
    parts = batch.positions.chunk(trace.degree, SEQ_DIM)
    own = parts[index]
    batch_size, length = own.shape
    sequence_dim = (DimFactor(length, sharded=True),)
    dims = (whole_dim(batch_size), sequence_dim)
    trace.set(own, Value(dims))
    return replace(batch, positions=own)
