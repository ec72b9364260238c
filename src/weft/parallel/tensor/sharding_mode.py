"""Dispatch mode of the sharding trace: which tensors are sharded, and on which side of a region each one is.

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

    Note [Whole sequences]
        Under sequence parallelism a block that is not accepted on parts of the sequence may work on
        whole ones, if its class says so (`may_gather_sequence`): its input is all-gathered, it is
        transformed as without sequence parallelism, and each rank hands on its part of the output.

    The same idea as varying and unvarying values in JAX's `shard_map`; the gradient of an unvarying
    operand is summed there, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.models.common.dropout_mode import CallShards
from weft.models.common.uncompiled import uncompiled_mode
from weft.parallel.autograd.tree import TensorNotes, tensors_in
from weft.parallel.tensor.dims import (
    DimFactor,
    Dims,
    ShardingError,
    is_repeated,
    is_sharded,
    length,
    whole_dim,
    whole_dims,
)
from weft.parallel.tensor.propagate import arguments, rule_of
from weft.parallel.tensor.region import SEQ_DIM
from weft.parallel.tensor.traced_op import TracedOp
from weft.parallel.tensor.width_statistics import Width

DECLARE_ENTRY = (
    "shard nn.Linear weights alone, whose input enters a region, or declare both ends in one module: "
    "weft.RegionInput and weft.RegionOutput; or name axes that are not sharded"
)


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
        several = [dim for dim in self.dims if length(dim) > 1]
        return any(map(is_repeated, several))

    @property
    def varies(self) -> bool:
        """Whether a gradient that flows through it differs between ranks."""
        return self.inside or self.sharded


@dataclass(frozen=True)
class WholeSequence:
    """A block that works on whole sequences under sequence parallelism; see Note [Whole sequences].

    Attributes:
        reason: why it does not work on parts of them.
        is_gathered: whether its input is all-gathered: that of the first block are tokens.
        is_split: whether each rank hands on its part of the output: a loss reads it whole.
    """

    reason: str
    is_gathered: bool
    is_split: bool


@dataclass
class Findings:
    """What a trace found.

    Attributes:
        entries: path of the first column-parallel linear that reads a tensor -> paths of all that
            read it.
        inside_columns: column-parallel linears whose input is inside a region already.
        entry_columns: those of them that read what a declared region begins with.
        uses: whole parameter -> whether its gradient is a partial sum, for each side on which it is
            used.
        sharded_losses: loss whose logits are sharded along the vocabulary -> this rank's entries of
            it.
        shared_heads: attention whose heads of queries are sharded, and those of keys and values whole
            -> this rank's heads of queries.
        dropout: name of a block -> how the tensors of its calls of dropout are sharded.
        statistics: module -> at each of its calls of a function over its last dim, in order, this
            rank's entries where the statistic is over ranks, else 0; see Note [Statistics over ranks].
        whole: name of a block -> how it works on whole sequences.
    """

    entries: dict[str, list[str]] = field(default_factory=dict)
    inside_columns: set[str] = field(default_factory=set)
    entry_columns: set[str] = field(default_factory=set)
    uses: dict[str, set[bool]] = field(default_factory=dict)
    sharded_losses: dict[str, int] = field(default_factory=dict)
    shared_heads: dict[str, int] = field(default_factory=dict)
    dropout: dict[str, tuple[CallShards, ...]] = field(default_factory=dict)
    statistics: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: dict[str, WholeSequence] = field(default_factory=dict)

    @property
    def partial(self) -> frozenset[str]:
        """Whole parameters whose gradients are partial sums over the axis."""
        names: set[str] = set()
        for name, is_partial in self.uses.items():
            if True in is_partial:
                names.add(name)
        return frozenset(names)

    def of_block(self, block: str) -> Findings:
        """Those about one block, no parameter of which is another block's."""
        found = Findings()
        for path, readers in self.entries.items():
            if _is_below(path, block):
                found.entries[path] = list(readers)
        found.inside_columns = {path for path in self.inside_columns if _is_below(path, block)}
        found.entry_columns = {path for path in self.entry_columns if _is_below(path, block)}
        for name, is_partial in self.uses.items():
            if _is_below(name, block):
                found.uses[name] = set(is_partial)
        for path, num_entries in self.sharded_losses.items():
            if _is_below(path, block):
                found.sharded_losses[path] = num_entries
        for path, num_heads in self.shared_heads.items():
            if _is_below(path, block):
                found.shared_heads[path] = num_heads
        for path, widths in self.statistics.items():
            if _is_below(path, block):
                found.statistics[path] = widths
        found.dropout[block] = self.dropout.get(block, ())
        return found

    def renamed(self, old: str, new: str) -> Findings:
        """The same about another block; `old` and `new` are names of blocks."""

        def rename(path: str) -> str:
            return new + path.removeprefix(old)

        found = Findings()
        for path, readers in self.entries.items():
            found.entries[rename(path)] = list(map(rename, readers))
        found.inside_columns = set(map(rename, self.inside_columns))
        found.entry_columns = set(map(rename, self.entry_columns))
        for name, is_partial in self.uses.items():
            found.uses[rename(name)] = set(is_partial)
        for path, num_entries in self.sharded_losses.items():
            found.sharded_losses[rename(path)] = num_entries
        for path, num_heads in self.shared_heads.items():
            found.shared_heads[rename(path)] = num_heads
        for path, widths in self.statistics.items():
            found.statistics[rename(path)] = widths
        for name, calls in self.dropout.items():
            found.dropout[rename(name)] = calls
        return found

    def add(self, other: Findings) -> None:
        """Add what was found about another block."""
        self.entries.update(other.entries)
        self.inside_columns.update(other.inside_columns)
        self.entry_columns.update(other.entry_columns)
        self.uses.update(other.uses)
        self.sharded_losses.update(other.sharded_losses)
        self.shared_heads.update(other.shared_heads)
        self.statistics.update(other.statistics)
        self.dropout.update(other.dropout)


def _reject_parameters(unknown: Iterable[Tensor]) -> None:
    """Every parameter of the traced copy is known: another one is that of the block itself."""
    if any(isinstance(tensor, nn.Parameter) for tensor in unknown):
        raise ShardingError(
            "its forward reads a parameter by something else than its modules",
            fix="read it by an attribute of the module: not by a global, a default argument or a cache",
        )


def _is_below(path: str, block: str) -> bool:
    """Whether a path is that of a block, or of something inside it."""
    return path == block or path.startswith(f"{block}.")


def _memory(tensor: Tensor) -> int:
    """Identity of the memory that a tensor views."""
    return int(tensor.untyped_storage()._cdata)


@uncompiled_mode
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
        self.is_paused = False
        self._leaf = ""
        self._widths: list[int] = []
        self._values: TensorNotes[Value] = TensorNotes()
        self._fresh: dict[int, Tensor] = {}
        self._readers: dict[int, str] = {}
        self._region_inputs: list[Tensor] = []

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._values

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor; of an unknown one, that it is a whole constant."""
        known = self._values.get(tensor)
        if known is not None:
            return known
        dims = whole_dims(tensor.shape)
        return Value(dims)

    def set(self, tensor: Tensor, value: Value) -> Tensor:
        """Note the value of a tensor."""
        self._values.set(tensor, value)
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
        name = func.overloadpacket.__name__
        tensors = list(tensors_in((args, kwargs)))
        is_constant = name.startswith("new_")
        are_known = [tensor in self._values for tensor in tensors]
        if not self.is_paused and not all(are_known):
            _reject_parameters(
                tensor for tensor, known in zip(tensors, are_known, strict=True) if not known
            )
        if is_constant or not any(are_known):
            out = func(*args, **kwargs)
            if not tensors or is_constant:
                self._fresh.update({_memory(tensor): tensor for tensor in tensors_in(out)})
            return out
        values = list(map(self.value, tensors))
        is_plain = not any(value.sharded or value.repeated for value in values)
        if is_plain and name != "expand":
            out = func(*args, **kwargs)
            out_dims = [whole_dims(tensor.shape) for tensor in tensors_in(out)]
            self._note(out, out_dims, values)
            self._note_write(func, out)
            return out
        rule = rule_of(func)
        if rule is None:
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
            raise ShardingError(f"{name} of a sharded tensor has no rule")
        out = func(*args, **kwargs)
        operation = TracedOp(
            name=name,
            args=arguments(func, args, kwargs),
            operands=tuple(value.dims for value in values),
            outputs=tuple(tensors_in(out)),
        )
        self._note(out, rule(operation), values)
        self._note_write(func, out)
        return out

    def _note(self, out: Any, dims: list[Dims], values: list[Value]) -> Any:
        value = self.combined(values)
        for tensor, its_dims in zip(tensors_in(out), dims, strict=True):
            self.set(tensor, replace(value, dims=its_dims))
        return out

    def _note_write(self, func: Any, part: Any) -> None:
        """Of a new tensor, a part of which an operation wrote, the dims that are sharded.

        Raises:
            ShardingError: the sharded dim is not one of the whole, or other parts are not sharded.
        """
        is_write = func._schema.is_mutable and isinstance(part, Tensor)
        whole = self._fresh.get(_memory(part)) if is_write else None
        if whole is None or whole is part:
            return
        written, value = self.value(whole), self.value(part)
        dims = list(written.dims)
        for size, stride, dim in zip(part.shape, part.stride(), value.dims, strict=True):
            places = [at for at in range(whole.dim()) if whole.stride(at) == stride]
            if is_sharded(dim) and size not in [whole.shape[at] for at in places]:
                raise ShardingError("a sharded dim is written into a part of another one")
            for at in places:
                if is_sharded(dim) and whole.shape[at] == size:
                    dims[at] = dim
                elif is_sharded(dims[at]) and not (is_sharded(dim) or is_repeated(dim)):
                    raise ShardingError("a whole dim is written into a sharded one")
        self.set(whole, replace(self.combined([written, value]), dims=tuple(dims)))

    def combined(self, values: list[Value]) -> Value:
        """Side and sources of a result, from those of the operands; notes on which side whole
        parameters are used.
        """
        inside = any(value.inside for value in values)
        varies = any(value.varies for value in values)
        activation = any(value.activation for value in values)
        params: set[str] = set()
        for value in values:
            params.update(value.params)
            if inside and value.activation and not value.inside:
                raise ShardingError(
                    "an activation from outside a tensor-parallel region meets a sharded one",
                    fix=DECLARE_ENTRY,
                )
        if inside or activation:
            self.use(frozenset(params), partial=varies)
            params.clear()
        return Value(dims=(), inside=inside, activation=activation, params=frozenset(params))

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
            local_length = tensor.shape[SEQ_DIM]
            dims[SEQ_DIM] = (DimFactor(local_length, sharded=True),)
        value = Value(tuple(dims), activation=True)
        return self.set(tensor, value)

    @contextmanager
    def on_whole_sequences(self) -> Iterator[None]:
        """Activations outside regions are whole inside; see Note [Whole sequences]."""
        self.sequence_parallel = False
        try:
            yield
        finally:
            self.sequence_parallel = True

    def has_parts(self, x: Tensor) -> bool:
        """Whether an activation is sharded along the sequence."""
        return x.dim() > SEQ_DIM and is_sharded(self.value(x).dims[SEQ_DIM])

    def gathered(self, x: Tensor) -> Tensor:
        """The whole activation, of which each rank has the tokens of its part."""
        shape = list(x.shape)
        shape[SEQ_DIM] *= self.degree
        return self.set(x.new_empty(shape), Value(whole_dims(shape), activation=True))

    def split(self, x: Tensor) -> Tensor:
        """This rank's part of an activation that is the same on all ranks."""
        shape = list(x.shape)
        shape[SEQ_DIM] //= self.degree
        return self.outside(x.new_empty(shape))

    def enter(self, x: Tensor) -> Tensor:
        """The input of a region, from an activation outside: whole along the sequence."""
        value = self.value(x)
        self.use(value.params, partial=value.varies)
        shape = list(x.shape)
        if self.sequence_parallel:
            if not self.has_parts(x):
                raise ShardingError(
                    "sequence parallelism: the input of a region is not sharded along the sequence"
                )
            shape[SEQ_DIM] *= self.degree
        entered = x.new_empty(shape)
        entered_value = Value(dims=whole_dims(shape), inside=True, activation=True)
        return self.set(entered, entered_value)

    def enter_declared(self, x: Tensor) -> Tensor:
        """The input of a region that a model declares."""
        entered = self.enter(x)
        self._region_inputs.append(entered)
        return entered

    def leave(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The sum over ranks of tensors of this shape; with sequence parallelism each rank's part
        of the sequence.
        """
        local = list(shape)
        if self.sequence_parallel:
            is_divisible = len(local) > SEQ_DIM and local[SEQ_DIM] % self.degree == 0
            if not is_divisible:
                raise ShardingError(
                    f"sequence parallelism: {shape} does not divide over {self.degree} ranks"
                )
            local[SEQ_DIM] //= self.degree
        left = like.new_empty(local)
        return self.outside(left)

    def read(self, x: Tensor, column: str) -> Tensor:
        """A column-parallel linear reads x: it enters a region, or shares the entry of another one
        that read the same tensor.
        """
        value = self.value(x)
        if value.inside:
            self.findings.inside_columns.add(column)
            if any(x is entered for entered in self._region_inputs):
                self.findings.entry_columns.add(column)
            return x
        first = self._readers.setdefault(id(x), column)
        readers = self.findings.entries.setdefault(first, [])
        if column not in readers:
            readers.append(column)
        if x not in self._values:  # keeps x, so that its id stays its own
            self._values.set(x, value)
        return self.enter(x)

    def enter_leaf(self, path: str) -> None:
        """A module without children is called."""
        self._leaf, self._widths = path, []

    def leave_leaf(self) -> None:
        """It returns; its statistics are noted.

        Raises:
            ShardingError: another call of it computes others.
        """
        path, widths = self._leaf, tuple(self._widths)
        self._leaf = ""
        known = self.findings.statistics.setdefault(path, widths)
        if known != widths and any((*known, *widths)):
            raise ShardingError("a norm is called on a sharded width and on another one")

    def width_of(self, x: Tensor) -> Width | None:
        """The width that a module without children computes a statistic of; None where it is whole."""
        if not self._leaf:
            return None
        own = int(x.shape[-1]) if is_sharded(self.value(x).dims[-1]) else 0
        self._widths.append(own)
        return Width(self.total, own * self.degree) if own else None

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over its sharded last dim on all ranks."""
        value = self.value(x)
        total = x.new_empty((*x.shape[:-1], 1))
        combined = self.combined([value])
        return self.set(total, replace(combined, dims=(*value.dims[:-1], whole_dim(1))))

    def forget_readers(self) -> None:
        """Linears share entries only with those of their own block."""
        self._readers.clear()
        self._region_inputs.clear()
        self._fresh.clear()
        self._leaf = ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not followed."""
        values, self._values = self._values, TensorNotes()
        self.is_paused = True
        try:
            yield
        finally:
            self._values = values
            self.is_paused = False
