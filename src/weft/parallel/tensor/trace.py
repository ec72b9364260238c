"""Trace of a tensor-parallel model on the meta device: where regions are entered and which gradients are partial sums.

Note [Sharding trace]
    The whole chain of blocks runs once, on meta tensors, with the shards of one rank in place of
    the parameters. Every tensor has a `Value`: which of its dims are sharded (propagate.py), and on
    which side of a region it is:

        outside   the same on all ranks (or, with sequence parallelism, this rank's tokens)
        inside    computed from the input of a region: each rank has its own heads or features of it,
                  or the same values but its own part of their gradient

              x ──────────── norm ──┬── q ── q_norm ──┬── attention ── o ──── + ── x        q, k, v: column-parallel
                outside             ├── k ────────────┤                  outside            o: row-parallel
                              enter └── v ── inside ──┘     leave

    A column-parallel linear enters a region at its input, unless that is inside already; linears
    that read the same tensor share the entry. A row-parallel linear leaves it. From the sides
    follows all else:

        a whole parameter that meets values inside           its gradient is a partial sum, summed over the axis
        a whole parameter that meets values outside          its gradient is whole on every rank (with sequence
                                                             parallelism: partial, each rank has its
                                                                 tokens)
        a parameter that does both                           rejected
        an activation from outside that meets one inside     rejected: its gradient would miss the other ranks' parts

    The same idea as varying and unvarying values in JAX's `shard_map`; the gradient of an unvarying
    operand is summed there, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core.attention_mask import ALL_FEATURES, Feature
from weft.errors import Fault, PlanError
from weft.models.common.attention import Attend, AttentionSpec, overrides_forward
from weft.models.common.batch import Batch, Extra
from weft.models.common.layers import Loss, RegionInput, RegionOutput
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.parallel.model.chain import replace_module
from weft.parallel.model.fingerprint import META, TensorSpec, fingerprint
from weft.parallel.tensor.propagate import (
    Dim,
    DimFactor,
    Dims,
    Operand,
    ShardingError,
    TracedOp,
    arguments,
    is_repeated,
    is_sharded,
    length,
    rule_of,
    whole_dims,
)

SEQ_DIM = 1
"""Dim of the sequence in x_BSD."""


@dataclass(frozen=True)
class Value:
    """What the trace knows of a tensor; see Note [Sharding trace].

    Attributes:
        dims: its dims, whole or sharded.
        inside: whether it was computed from a sharded parameter or the input of a region.
        activation: whether it was computed from an activation, whose gradient flows on.
        params: whole parameters from which alone it was computed.
    """

    dims: Dims
    inside: bool = False
    activation: bool = False
    params: frozenset[str] = frozenset()

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different entries."""
        return any(map(is_sharded, self.dims))

    @property
    def repeated(self) -> bool:
        """Whether some dim's entries are all equal, and several."""
        return any(is_repeated(dim) and length(dim) > 1 for dim in self.dims)

    @property
    def varies(self) -> bool:
        """Whether a gradient that flows through it differs between ranks."""
        return self.inside or self.sharded


@dataclass
class Findings:
    """What a trace found.

    Attributes:
        entries: path of the first column-parallel linear that reads a tensor -> paths of all that
            read it.
        inside_columns: column-parallel linears whose input is inside a region already.
        uses: whole parameter -> whether its gradient is a partial sum, for each side on which it is
            used.
        sharded_losses: loss whose logits are sharded along the vocabulary -> this rank's entries of
            it.
    """

    entries: dict[str, list[str]] = field(default_factory=dict)
    inside_columns: set[str] = field(default_factory=set)
    uses: dict[str, set[bool]] = field(default_factory=dict)
    sharded_losses: dict[str, int] = field(default_factory=dict)

    @property
    def partial(self) -> frozenset[str]:
        """Whole parameters whose gradients are partial sums over the axis."""
        return frozenset(name for name, sides in self.uses.items() if True in sides)

    def of_block(self, block: str) -> Findings:
        """Those about one block, no parameter of which is another block's."""

        def is_below(path: str) -> bool:
            return path == block or path.startswith(f"{block}.")

        return Findings(
            entries={path: list(all_) for path, all_ in self.entries.items() if is_below(path)},
            inside_columns={path for path in self.inside_columns if is_below(path)},
            uses={name: set(sides) for name, sides in self.uses.items() if is_below(name)},
            sharded_losses={
                path: size for path, size in self.sharded_losses.items() if is_below(path)
            },
        )

    def renamed(self, old: str, new: str) -> Findings:
        """The same about another block; `old` and `new` are names of blocks."""

        def name(path: str) -> str:
            return new + path.removeprefix(old)

        return Findings(
            entries={
                name(path): [name(reader) for reader in readers]
                for path, readers in self.entries.items()
            },
            inside_columns={name(path) for path in self.inside_columns},
            uses={name(path): set(sides) for path, sides in self.uses.items()},
            sharded_losses={name(path): size for path, size in self.sharded_losses.items()},
        )

    def add(self, other: Findings) -> None:
        """Add what was found about another block."""
        self.entries.update(other.entries)
        self.inside_columns.update(other.inside_columns)
        self.uses.update(other.uses)
        self.sharded_losses.update(other.sharded_losses)


class ShardingTrace(TorchDispatchMode):
    """Follows values through every torch operation of a forward; see Note [Sharding trace].

    Args:
        degree: ranks along the axis.
        sequence_parallel: whether activations outside regions are sharded along the sequence.
    """

    def __init__(self, *, degree: int, sequence_parallel: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.degree = degree
        self.sequence_parallel = sequence_parallel
        self.findings = Findings()
        self.module = ""
        self._values: dict[int, tuple[Tensor, Value]] = {}
        self._readers: dict[int, str] = {}

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor; of an unknown one, that it is a whole constant."""
        known = self._values.get(id(tensor))
        return Value(whole_dims(tensor.shape)) if known is None else known[1]

    def set(self, tensor: Tensor, value: Value) -> Tensor:
        """Note the value of a tensor."""
        self._values[id(tensor)] = (tensor, value)
        return tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation: runs it and notes the values of its results."""
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        is_constant = func.overloadpacket.__name__.startswith("new_")
        if is_constant or not any(id(tensor) in self._values for tensor in tensors):
            return func(*args, **kwargs)
        values = [self.value(tensor) for tensor in tensors]
        is_plain = not any(value.sharded or value.repeated for value in values)
        if is_plain and func.overloadpacket.__name__ != "expand":
            out = func(*args, **kwargs)
            return self._note(out, [whole_dims(tensor.shape) for tensor in tensors_in(out)], values)
        rule = rule_of(func)
        if rule is None:
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
            raise ShardingError(f"{func.overloadpacket.__name__} of a sharded tensor has no rule")
        out = func(*args, **kwargs)
        operation = TracedOp(
            name=func.overloadpacket.__name__,
            args=arguments(func, args, kwargs),
            operands=tuple(Operand(value.dims) for value in values),
            outputs=tuple(tensors_in(out)),
        )
        return self._note(out, rule(operation), values)

    def _note(self, out: Any, dims: list[Dims], values: list[Value]) -> Any:
        value = self._combined(values)
        for tensor, its_dims in zip(tensors_in(out), dims, strict=True):
            self.set(tensor, replace(value, dims=its_dims))
        return out

    def _combined(self, values: list[Value]) -> Value:
        """Side and sources of a result, from those of the operands; notes on which side whole
        parameters are used.
        """
        inside = any(value.inside for value in values)
        activation = any(value.activation for value in values)
        if inside and any(value.activation and not value.inside for value in values):
            raise ShardingError(
                "an activation from outside a tensor-parallel region meets a sharded one"
            )
        params = frozenset[str]().union(*(value.params for value in values))
        if inside or activation:
            self.use(params, partial=any(value.varies for value in values))
            params = frozenset()
        return Value((), inside, activation, params)

    def use(self, params: frozenset[str], *, partial: bool) -> None:
        """Note a use of whole parameters.

        Raises:
            ShardingError: one is also used on the other side.
        """
        for name in params:
            sides = self.findings.uses.setdefault(name, set())
            sides.add(partial)
            if len(sides) > 1:
                raise ShardingError(
                    f"parameter {name} is used both inside and outside tensor-parallel regions"
                )

    def outside(self, tensor: Tensor) -> Tensor:
        """Note a tensor as an activation outside regions."""
        dims = list(whole_dims(tensor.shape))
        if self.sequence_parallel and tensor.dim() > SEQ_DIM:
            dims[SEQ_DIM] = (DimFactor(tensor.shape[SEQ_DIM], sharded=True),)
        return self.set(tensor, Value(tuple(dims), activation=True))

    def enter(self, x: Tensor) -> Tensor:
        """The input of a region, from an activation outside: whole along the sequence."""
        value = self.value(x)
        self.use(value.params, partial=value.varies)
        shape = list(x.shape)
        if self.sequence_parallel:
            is_part = x.dim() > SEQ_DIM and is_sharded(value.dims[SEQ_DIM])
            if not is_part:
                raise ShardingError(
                    "sequence parallelism: the input of a region is not sharded along the sequence"
                )
            shape[SEQ_DIM] *= self.degree
        return self.set(x.new_empty(shape), Value(whole_dims(shape), inside=True, activation=True))

    def leave(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The sum over ranks of tensors of this shape; with sequence parallelism each rank's part
        of the sequence.
        """
        local = list(shape)
        if self.sequence_parallel:
            if len(local) <= SEQ_DIM or local[SEQ_DIM] % self.degree:
                raise ShardingError(
                    f"sequence parallelism: {shape} does not divide over {self.degree} ranks"
                )
            local[SEQ_DIM] //= self.degree
        return self.outside(like.new_empty(local))

    def read(self, x: Tensor, column: str) -> Tensor:
        """A column-parallel linear reads x: it enters a region, or shares the entry of another one
        that read the same tensor.
        """
        if self.value(x).inside:
            self.findings.inside_columns.add(column)
            return x
        first = self._readers.setdefault(id(x), column)
        readers = self.findings.entries.setdefault(first, [])
        if column not in readers:
            readers.append(column)
        self._values.setdefault(id(x), (x, self.value(x)))  # keeps x, so that its id stays its own
        return self.enter(x)

    def forget_readers(self) -> None:
        """Linears share entries only with those of their own block."""
        self._readers.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not followed."""
        values, self._values = self._values, {}
        try:
            yield
        finally:
            self._values = values


class TracedRow(nn.Module):
    """Stands for a row-parallel linear: its input features are sharded, its output leaves the
    region.
    """

    def __init__(self, linear: nn.Linear, trace: ShardingTrace) -> None:
        super().__init__()
        self.linear = linear
        self.trace = trace
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        trace = self.trace
        if not is_sharded(trace.value(x).dims[-1]):
            raise ShardingError(
                "a row-parallel linear reads a tensor that is not sharded along its last dim"
            )
        if x.shape[-1] != self.linear.weight.shape[1]:
            raise self._wrong_length(x.shape[-1])
        for name, param in self.linear.named_parameters():
            if name != "bias":
                trace.use(trace.value(param).params, partial=True)
        y = trace.leave((*x.shape[:-1], self.linear.weight.shape[0]), x)
        return y if self.linear.bias is None else y + self.linear.bias

    def _wrong_length(self, length: int) -> ShardingError:
        local_length = self.linear.weight.shape[1]
        what = f"a row-parallel linear of {local_length} local inputs reads {length}"
        trace = self.trace
        if trace.sequence_parallel and length == local_length * trace.degree:
            return ShardingError(
                f"{what}: a reshape took this rank's number of positions for that of the sequence",
                fix=SIZES_IN_REGION,
            )
        return ShardingError(what)


class TracedEmbedding(nn.Module):
    """Stands for an embedding whose vocabulary is sharded."""

    def __init__(self, embedding: nn.Embedding, trace: ShardingTrace) -> None:
        super().__init__()
        self.embedding, self.trace = embedding, trace

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.embedding.weight
        return self.trace.leave((*tokens.shape, weight.shape[1]), weight)


class TracedLoss(nn.Module):
    """Stands for the loss: of logits that are sharded along the vocabulary, or whole."""

    def __init__(self, loss: Loss, path: str, trace: ShardingTrace) -> None:
        super().__init__()
        self.loss, self.path, self.trace = loss, path, trace

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        dims = self.trace.value(logits).dims
        if not (dims and is_sharded(dims[-1])):
            out: Tensor = self.loss(logits, batch)
            return out
        self.trace.findings.sharded_losses[self.path] = logits.shape[-1]
        return self.trace.set(logits.new_empty(()), Value((), activation=True))


class TracedRegionInput(nn.Module):
    """Stands for the entry of a region that a model declares."""

    def __init__(self, trace: ShardingTrace) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, x: Tensor) -> Tensor:
        return x if self.trace.value(x).inside else self.trace.enter(x)


class TracedRegion(nn.Module):
    """Stands for a module that declares both ends of its region: what lies between is taken as
    declared, not followed.

    Its whole parameters have partial gradients; its results of the input's shape have left the
    region.
    """

    def __init__(self, module: nn.Module, trace: ShardingTrace) -> None:
        super().__init__()
        self.module, self.trace = module, trace

    def forward(self, x: Tensor, *args: Any) -> Any:
        trace = self.trace
        calls: list[nn.Module] = []
        hooks = []
        for module in self.module.modules():
            if isinstance(module, (RegionInput, RegionOutput)):
                hook = module.register_forward_hook(lambda module, *_: calls.append(module))
                hooks.append(hook)
        entered = trace.enter(x)
        for param in self.module.parameters():
            trace.use(trace.value(param).params, partial=True)
        with trace.paused():
            out = self.module(entered, *args)
        for hook in hooks:
            hook.remove()
        kinds = sorted(type(module).__name__ for module in calls)
        if kinds != [RegionInput.__name__, RegionOutput.__name__]:
            name = type(self.module).__name__
            raise ShardingError(
                f"{name} declares a RegionInput and a RegionOutput, but its forward calls {kinds}"
            )

        def leave(tensor: Tensor) -> Tensor:
            if tensor.shape == entered.shape:
                return trace.leave(tuple(tensor.shape), tensor)
            activation = tensor.is_floating_point()
            return trace.set(tensor, Value(whole_dims(tensor.shape), activation=activation))

        return map_leaves(out, Tensor, leave)


class TracedAttention:
    """Stands for an implementation of the attention seam: heads may be sharded, all else is whole."""

    name = "tensor-parallel"
    supports: frozenset[Feature] = ALL_FEATURES
    alternative = ""

    def __init__(self, trace: ShardingTrace) -> None:
        self.trace = trace

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """Dims of the result, from those of q, k and v."""
        trace = self.trace
        per_head = [tensor for tensor in (spec.sinks, spec.head_bias) if tensor is not None]
        values = [trace.value(x) for x in (q_BSHK, k_BSGK, v_BSGW, *per_head)]
        combined = trace._combined(values)
        q_dims, k_dims, v_dims = (value.dims for value in values[:3])
        heads = [q_dims[2], k_dims[2], v_dims[2]]
        heads.extend(value.dims[0] for value in values[3:])
        if k_BSGK.shape[2] == 1 and not is_sharded(k_dims[2]):
            del heads[1:3]  # one key/value head serves all queries
        others: list[Dim] = []
        for dims in (q_dims, k_dims, v_dims):
            others.extend(dims[:2])
            others.extend(dims[3:])
        if any(is_sharded(dim) for dim in others):
            raise ShardingError(
                "attention over a dim that is sharded, but is not that of the heads"
            )
        num_sharded = sum(is_sharded(dim) for dim in heads)
        if num_sharded not in (0, len(heads)):
            raise ShardingError("attention of sharded heads with whole ones")
        num_heads = q_BSHK.shape[2]
        num_kv_heads = k_BSGK.shape[2]
        if num_heads % num_kv_heads:
            raise ShardingError(
                f"attention of {num_heads} local heads with {num_kv_heads} key/value heads"
            )
        out_shape = (*q_BSHK.shape[:-1], v_BSGW.shape[-1])
        out = q_BSHK.new_empty(out_shape)
        out_dims = (*q_dims[:-1], v_dims[-1])
        return trace.set(out, replace(combined, dims=out_dims))


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
) -> Findings:
    """Run the chain of plain blocks on shards of one rank; see Note [Sharding trace].

    Args:
        model: the plain blocks, on the meta device.
        kinds: block name -> its sharded modules.
        params: global name -> what the rank holds.
        batch: an example, on the meta device.
        index: place of the rank along the axis.
        records: those of a trace of the same blocks for another index, to which this one adds.

    Raises:
        PlanError: a block that does not compute on shards what it computes on whole tensors.
    """
    chain = ChainTrace(
        model,
        kinds,
        params,
        ShardingTrace(degree=degree, sequence_parallel=sequence_parallel),
        {} if records is None else records,
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
    ) -> None:
        self.model = model
        self.kinds = kinds
        self.params = params
        self.trace = trace
        self._copies: dict[int, Any] = {}
        self._instrumented: dict[int, nn.Module] = {}
        self._tied_blocks = _blocks_with_tied_params(model)
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
        structure = fingerprint(block)
        if structure is None:
            return None
        params = []
        for path, _ in block.named_parameters(remove_duplicate=False):
            params.append((path, self.params[f"{name}.{path}"]))
        x_facts = (TensorSpec.of(x), self.trace.value(x))
        return structure, self.kinds[name], tuple(params), x_facts, self._batch_facts(batch)

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


def _run(name: str, block: nn.Module, x: Tensor, batch: Batch, trace: ShardingTrace) -> Tensor:
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
    value = trace.value(x)
    if value.params:
        trace.use(value.params, partial=value.varies)
    if not value.inside:
        trace.set(x, Value(value.dims, activation=x.is_floating_point()))
    return x


SIZES_IN_REGION = (
    "take sizes from tensors inside the region, such as the output of the column-parallel linear: "
    "under sequence parallelism its input holds only this rank's positions"
)


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
    name: str, param: nn.Parameter, local: LocalParam, trace: ShardingTrace
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
    name: str, block: nn.Module, kinds: ShardedModules, trace: ShardingTrace
) -> nn.Module:
    """The copied block, with stand-ins for its sharded modules."""
    for path, module in block.named_modules():
        module.register_forward_pre_hook(_locator(f"{name}.{path}".rstrip("."), trace))
    for path in kinds.columns:
        if any(path.startswith(f"{region}.") for region in kinds.regions):
            continue
        block.get_submodule(path).register_forward_pre_hook(_reader(f"{name}.{path}", trace))
    for path in kinds.rows:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} was found to be a linear"
        replace_module(block, linear, TracedRow(linear, trace))
    for path in kinds.embeddings:
        embedding = block.get_submodule(path)
        assert isinstance(embedding, nn.Embedding), f"{path} was found to be an embedding"
        replace_module(block, embedding, TracedEmbedding(embedding, trace))
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


def _reader(
    path: str, trace: ShardingTrace
) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def read(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (trace.read(args[0], path), *args[1:])

    return read


def _locator(path: str, trace: ShardingTrace) -> Callable[[nn.Module, tuple[Any, ...]], None]:
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
