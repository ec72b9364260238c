"""Stand-ins of the sharding trace for the modules that parallel ones replace: linears, embeddings, losses, regions, attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from weft.core.attention_mask import ALL_FEATURES, Feature
from weft.models.common.attention_spec import AttentionSpec
from weft.models.common.batch import Batch
from weft.models.common.embedding_noise import plus_noise
from weft.models.common.layers import Loss, RegionInput, RegionOutput
from weft.models.common.lora import MAGNITUDE, adapter_input, magnitude_of
from weft.models.common.preference import PreferenceLoss
from weft.parallel.autograd.tree import map_leaves
from weft.parallel.tensor.dims import (
    DimFactor,
    Dims,
    ShardingError,
    is_sharded,
    length,
    order,
    whole_dims,
    with_dim,
)
from weft.parallel.tensor.sharding_mode import ShardingTrace, Value

SIZES_IN_REGION = (
    "take sizes from tensors inside the region, such as the output of the column-parallel linear: "
    "under sequence parallelism its input holds only this rank's positions"
)


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
        x_dims = trace.value(x).dims
        if not is_sharded(x_dims[-1]):
            raise ShardingError(
                "a row-parallel linear reads a tensor that is not sharded along its last dim"
            )
        *outer_shape, in_features = x.shape
        out_features, local_in_features = self.linear.weight.shape
        if in_features != local_in_features:
            raise self._wrong_length(in_features)
        if order(x_dims[-1]) != order(trace.value(self.weight).dims[1]):
            raise ShardingError(
                "a row-parallel linear reads features in another order than its own"
            )
        for name, param in self.linear.named_parameters():
            if name not in ("bias", f"{MAGNITUDE}.weight"):  # they come after the sum
                value = trace.value(param)
                trace.use(value.params, partial=True)
        adapter_input(self.linear, x)
        y_shape = (*outer_shape, out_features)
        y = trace.leave(y_shape, x)
        magnitude = magnitude_of(self.linear)
        if magnitude is not None:
            y = y * magnitude.weight
        bias: Tensor | None = self.linear.bias
        if bias is None:
            return y
        return y + bias

    def _wrong_length(self, num_inputs: int) -> ShardingError:
        trace = self.trace
        local_length = self.linear.weight.shape[1]
        what = f"a row-parallel linear of {local_length} local inputs reads {num_inputs}"
        is_whole_length = num_inputs == local_length * trace.degree
        if trace.sequence_parallel and is_whole_length:
            return ShardingError(
                f"{what}: a reshape took this rank's number of positions for that of the sequence",
                fix=SIZES_IN_REGION,
            )
        return ShardingError(what)


class TracedEmbedding(nn.Module):
    """Stands for an embedding whose vocabulary is sharded."""

    def __init__(self, embedding: nn.Embedding, trace: ShardingTrace) -> None:
        super().__init__()
        self.embedding = embedding
        self.trace = trace

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.embedding.weight
        num_features = weight.shape[1]
        x_shape = (*tokens.shape, num_features)
        return plus_noise(self.embedding, self.trace.leave(x_shape, weight))


class TracedLoss(nn.Module):
    """Stands for the loss: of logits that are sharded along the vocabulary, or whole."""

    def __init__(self, loss: Loss, path: str, trace: ShardingTrace) -> None:
        super().__init__()
        self.loss = loss
        self.path = path
        self.trace = trace

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        trace = self.trace
        dims = trace.value(logits).dims
        has_sharded_vocab = bool(dims) and is_sharded(dims[-1])
        if isinstance(self.loss, PreferenceLoss) and batch.pairs is None:
            # the example has no pairs: a loss of whole scores has a scalar that no rank shares
            if not has_sharded_vocab:
                return trace.set(logits.new_empty(()), Value((), activation=True))
        elif not has_sharded_vocab:
            out: Tensor = self.loss(logits, batch)
            return out
        losses = trace.findings.sharded_losses
        losses[self.path] = logits.shape[-1]
        loss = logits.new_empty(())
        return trace.set(loss, Value((), activation=True))


class TracedRegionInput(nn.Module):
    """Stands for the entry of a region that a model declares."""

    def __init__(self, trace: ShardingTrace) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, x: Tensor) -> Tensor:
        value = self.trace.value(x)
        if value.inside:
            return x
        return self.trace.enter_declared(x)


class TracedHeads(nn.Module):
    """Stands for the choice of a rank's heads of a tensor that is whole on every rank."""

    def __init__(self, trace: ShardingTrace) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, x: Tensor, dim: int, number: int) -> Tensor:
        trace = self.trace
        value = trace.value(x)
        is_outside = value.activation and not value.inside
        if is_outside or is_sharded(value.dims[dim]) or number * trace.degree != x.shape[dim]:
            raise ShardingError("a rank takes heads of a tensor that does not have all of them")
        shape = list(x.shape)
        shape[dim] = number
        dims = with_dim(value.dims, dim, (DimFactor(number, sharded=True),))
        return trace.set(x.new_empty(shape), replace(value, dims=dims, inside=True))


class TracedRegion(nn.Module):
    """Stands for a module that declares both ends of its region: what lies between is taken as
    declared, not followed.

    Its whole parameters have partial gradients; its results of the input's shape have left the
    region.
    """

    def __init__(self, module: nn.Module, trace: ShardingTrace) -> None:
        super().__init__()
        self.module = module
        self.trace = trace

    def forward(self, x: Tensor, *args: Any) -> Any:
        trace = self.trace
        entered = trace.enter(x)
        for param in self.module.parameters():
            value = trace.value(param)
            trace.use(value.params, partial=True)
        calls: list[str] = []
        with trace.paused(), _noted_ends(self.module, calls):
            out = self.module(entered, *args)
        if sorted(calls) != [RegionInput.__name__, RegionOutput.__name__]:
            name = type(self.module).__name__
            raise ShardingError(
                f"{name} declares a RegionInput and a RegionOutput, but its forward calls {sorted(calls)}"
            )

        def leave(tensor: Tensor) -> Tensor:
            if tensor.shape == entered.shape:
                shape = tuple(tensor.shape)
                return trace.leave(shape, tensor)
            value = Value(dims=whole_dims(tensor.shape), activation=tensor.is_floating_point())
            return trace.set(tensor, value)

        return map_leaves(out, Tensor, leave)


@contextmanager
def _noted_ends(region: nn.Module, calls: list[str]) -> Iterator[None]:
    """Append the class names of the region's declared ends that are called meanwhile."""

    def note(module: nn.Module, *_: object) -> None:
        calls.append(type(module).__name__)

    hooks = [
        module.register_forward_hook(note)
        for module in region.modules()
        if isinstance(module, (RegionInput, RegionOutput))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class TracedAttention:
    """Stands for an implementation of the attention seam: heads may be sharded, all else is whole.

    Note [Shared heads of keys and values]
        Where tp does not divide the heads of keys and values, each rank has all of them, and computes
        them from the same input: its own heads of queries read some. Which these are depends on the
        rank, so the attention of the rank picks them (`OwnHeads`). Gradients of their projections are
        partial sums over tp, as those of all whole parameters inside a region.
    """

    name = "tensor-parallel"
    supports: frozenset[Feature] = ALL_FEATURES
    alternative = ""

    def __init__(self, trace: ShardingTrace, path: str) -> None:
        self.trace = trace
        self.path = path

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """Dims of the result, from those of q, k and v."""
        trace = self.trace
        q = trace.value(q_BSHK)
        k = trace.value(k_BSGK)
        v = trace.value(v_BSGW)
        per_head: list[Value] = [
            trace.value(tensor) for tensor in (spec.sinks, spec.head_bias) if tensor is not None
        ]
        combined = trace.combined([q, k, v, *per_head])
        if _are_shared(q.dims, k.dims, v.dims, per_head=per_head, degree=trace.degree):
            trace.findings.shared_heads[self.path] = q_BSHK.shape[2]
        *outer_shape, _ = q_BSHK.shape
        *outer_dims, _ = q.dims
        out = q_BSHK.new_empty((*outer_shape, v_BSGW.shape[-1]))
        out_dims = (*outer_dims, v.dims[-1])
        return trace.set(out, replace(combined, dims=out_dims))


def _are_shared(
    q_BSHK: Dims, k_BSGK: Dims, v_BSGW: Dims, *, per_head: Sequence[Value], degree: int
) -> bool:
    """Whether the heads of queries are sharded, and those of keys and values whole and several.

    Args:
        per_head: tensors with the heads of queries first.

    Raises:
        ShardingError: another dim is sharded, or the numbers of heads do not fit.
    """
    for batch, sequence, _, features in (q_BSHK, k_BSGK, v_BSGW):
        for dim in (batch, sequence, features):
            if is_sharded(dim):
                raise ShardingError(
                    "attention over a dim that is sharded, but is not that of the heads"
                )
    q_heads, k_heads, v_heads = q_BSHK[2], k_BSGK[2], v_BSGW[2]
    num_heads = length(q_heads)
    num_kv_heads = length(k_heads)
    heads = [q_heads]
    is_whole = not is_sharded(k_heads) and not is_sharded(v_heads)
    are_shared = is_sharded(q_heads) and is_whole and num_kv_heads > 1
    if are_shared:
        num_heads *= degree
    elif num_kv_heads > 1 or not is_whole:
        heads += [k_heads, v_heads]
    for value in per_head:
        heads.append(value.dims[0])
    if len(set(map(is_sharded, heads))) > 1:
        raise ShardingError("attention of sharded heads with whole ones")
    if len(set(map(order, heads))) > 1:
        raise ShardingError("attention of heads that ranks hold in another order")
    if num_heads % num_kv_heads:
        raise ShardingError(
            f"attention of {num_heads} local heads with {num_kv_heads} key/value heads"
        )
    return are_shared
