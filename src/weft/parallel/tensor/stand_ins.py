"""Stand-ins of the sharding trace for the modules that parallel ones replace: linears, embeddings, losses, regions, attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from weft.core.attention_mask import ALL_FEATURES, Feature
from weft.models.common.attention import AttentionSpec
from weft.models.common.batch import Batch
from weft.models.common.layers import Loss, RegionInput, RegionOutput
from weft.parallel.autograd.tree import map_leaves
from weft.parallel.tensor.dims import Dim, ShardingError, is_sharded, whole_dims
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
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGW: Tensor,
        batch: Batch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Dims of the result, from those of q, k and v."""
        trace = self.trace
        per_head = [tensor for tensor in (spec.sinks, spec.head_bias) if tensor is not None]
        values = [trace.value(x) for x in (q_BSHK, k_BSGK, v_BSGW, *per_head)]
        combined = trace.combined(values)
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
