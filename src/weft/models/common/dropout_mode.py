"""The mode in which blocks run: dropout of torch, of attention and of paths by counter. See Note [Counter-based dropout].

Note [Dropout of torch]
    `CounterDropout` is a mode of torch that sees every call of a torch function in the forward of a
    block: nn.Dropout, F.dropout, F.dropout1d to 3d, the dropout of scaled_dot_product_attention and
    of nn.MultiheadAttention, weft's Attend and drop_path. Where the batch has keys they drop by
    counter; where it has none, in evaluation and generation, they drop nothing. What else draws
    random numbers runs as it is, and is rejected when a model is checked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.core.attention_mask import AttentionMask
from weft.core.entry_places import (
    ONE_DEVICE,
    WHOLE,
    DimEntries,
    DimShard,
    ShardingRank,
    held_entries,
)
from weft.core.query_blocks import row_blocks
from weft.errors import Fault, PlanError
from weft.models.common.attention_kernels import attention_device
from weft.models.common.attention_spec import AttentionSpec, attention_call
from weft.models.common.block_attention import SequenceAttention
from weft.models.common.dropout import (
    AttentionDraws,
    DropoutDraws,
    attention_draws,
    call_key,
    drop,
    drop_path,
    has_no_memory,
    times_factors,
    uniform_like,
)
from weft.models.common.embedding_noise import NOISE, add_noise, embedding_noise

CallShards = tuple[DimShard, ...]
"""How each dim of the tensor of one call is sharded."""
NO_KEYS = "drops out in training, and its batch has no keys of random numbers"
CHECKPOINT = "torch.utils.checkpoint"
COMPILED = "torch._dynamo.eval_frame"
"""Module that defines the class of what `torch.compile` makes of a module."""


class CounterDropout(TorchFunctionMode):
    """One forward of a block, whose dropout is by counter.

    Args:
        block: its name.
        sequence_keys: int64 [B] of the batch; None: nothing is dropped.
        calls: how the tensor of each call is sharded; None: it is whole.
        rank: the rank's place among the shards.
        documents_BT: documents of whole sequences, of which noise is a function; None: each is one.

    Attributes:
        num_calls: calls so far that drop something.
    """

    def __init__(
        self,
        block: str,
        sequence_keys: Tensor | None,
        *,
        calls: Sequence[CallShards] | None = None,
        rank: ShardingRank = ONE_DEVICE,
        documents_BT: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.sequence_keys = sequence_keys
        self.calls = calls
        self.rank = rank
        self.documents_BT = documents_BT
        self.num_calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of `func`, for every function of torch."""
        replacement = REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self, *args, **(kwargs or {}))

    def draws(self, x: Tensor, shape: tuple[int, ...], p: float) -> DropoutDraws | None:
        """The random numbers of the next call, for a tensor of this shape; None: nothing is dropped.

        Args:
            x: the tensor that the call is about, whose first dims are those of the shape.

        Raises:
            PlanError: the first dim does not count sequences; or a batch without keys is trained on.
        """
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        number = self.num_calls
        # also where nothing is dropped: numbers of later calls must not depend on keys or probabilities
        self.num_calls += 1
        keys = self.sequence_keys
        # it repeats the code without this mode, and torch's generator would draw other masks
        if torch.is_grad_enabled() and _is_checkpointed():
            what = (
                "drops out inside torch.utils.checkpoint, which repeats it without this run's masks"
            )
            fix = "--parallel.recompute full in its place"
            raise PlanError(Fault(self.block, what, fix=fix))
        if keys is None:
            if not torch.is_grad_enabled():
                return None
            need = "Batch.draw_keys, one number for each sequence and step"
            raise PlanError(Fault(self.block, NO_KEYS, need=need))
        num_sequences = len(keys)
        if not shape or shape[0] % num_sequences:
            what = "drops entries of a tensor whose first dim does not count sequences"
            need = f"a multiple of {num_sequences} sequences first"
            raise PlanError(Fault(self.block, what, got=f"shape {list(shape)}", need=need))
        sizes = (shape[0] // num_sequences, *shape[1:])
        shards = self._shards(number)
        held = [
            held_entries(shards[place] if place < len(shards) else WHOLE, size, self.rank)
            for place, size in enumerate(sizes)
        ]
        dims = tuple(held) if sizes[0] > 1 or held[0].length > 1 else tuple(held[1:])
        return DropoutDraws(float(p), keys, call_key(self.block, number), dims)

    def _shards(self, number: int) -> CallShards:
        if self.calls is None:
            return ()
        if number >= len(self.calls):
            what = "drops out more often in training than when its shards were traced"
            fix = "a forward without branches, or a mesh without tp and cp"
            raise PlanError(Fault(self.block, what, got=f"{number + 1} calls", fix=fix))
        return self.calls[number]

    def draws_of_attention(self, q_BSHK: Tensor, p: float) -> AttentionDraws | None:
        """The random numbers of the next call of weft's attention."""
        draws = self.draws(q_BSHK, tuple(q_BSHK.shape[:1]), p)
        if draws is None:
            return None
        shards = self._shards(self.num_calls - 1)
        heads = held_entries(shards[2] if shards else WHOLE, q_BSHK.shape[2], self.rank)
        return AttentionDraws(heads, draws)


def _is_checkpointed() -> bool:
    """Whether the running code is repeated by torch.utils.checkpoint, outside of modes."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == CHECKPOINT


class HasDrawKeys(Protocol):
    """A batch, as far as dropout reads it."""

    @property
    def draw_keys(self) -> Tensor | None:
        """int64 [B]; None: nothing is dropped."""

    @property
    def documents_of_sequences(self) -> Tensor | None:
        """documents_BT of whole sequences; None: each is one."""


def run_block(name: str, block: nn.Module, x: Any, batch: HasDrawKeys) -> Any:
    """The output of a plain block on whole sequences, in which dropout is by counter."""
    if has_compiled(block):
        return block(x, batch)
    with CounterDropout(name, batch.draw_keys, documents_BT=batch.documents_of_sequences):
        return block(x, batch)


def has_compiled(block: nn.Module) -> bool:
    """Whether modules of a block are compiled: their dropout is torch's own."""
    return any(type(module).__module__ == COMPILED for module in block.modules())


def may_drop(block: nn.Module) -> bool:
    """Whether a forward of the block may drop out: it says so in `drops_out`, a module of torch or
    weft does, or it has code of others.
    """
    declared = getattr(block, "drops_out", None)
    if isinstance(declared, bool):
        return declared
    return any(map(_may_drop, block.modules()))


def _may_drop(module: nn.Module) -> bool:
    return _has_code_of_others(module) or any(p > 0 for p in _probabilities(module))


def _has_code_of_others(module: nn.Module) -> bool:
    home = type(module).__module__
    return not home.startswith(("torch.", "weft.")) or "forward" in vars(module)


def dropout_settings(block: nn.Module) -> tuple[float, ...]:
    """What shows that dropout of a block begins: the probabilities and modes of its modules, and all
    numbers that are attributes of modules with code of others.
    """
    return tuple(itertools.chain.from_iterable(map(_settings, block.modules())))


def _settings(module: nn.Module) -> Iterator[float]:
    yield module.training
    yield from _probabilities(module)
    if _has_code_of_others(module):
        for value in vars(module).values():
            if isinstance(value, int | float):
                yield value


def _probabilities(module: nn.Module) -> Iterator[float]:
    for name in ("p", "dropout", "lora_dropout", NOISE):
        p = getattr(module, name, None)
        if isinstance(p, int | float):
            yield p


# What is called in place of functions of torch and weft; arguments as theirs.


def _dropout(
    mode: CounterDropout,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training:
        return input
    return _dropped(mode, input, p, num_dims=input.dim(), inplace=inplace)


def _channels(
    mode: CounterDropout,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Whole channels: entries of the first two dims."""
    return _dropped(mode, input, p, num_dims=2, inplace=inplace) if training else input


def _torch_dropout_(mode: CounterDropout, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train, inplace=True)


def _dropped(mode: CounterDropout, x: Tensor, p: float, *, num_dims: int, inplace: bool) -> Tensor:
    """x without some entries of its first dims, each of them with all entries below it."""
    if p == 0 or not x.numel():
        return x
    draws = mode.draws(x, tuple(x.shape[:num_dims]), p)
    if draws is None:
        return x
    shape = (*x.shape[:num_dims], *[1] * (x.dim() - num_dims))
    if inplace:
        return x.mul_(draws.factors(x.dtype).view(shape))
    return drop(x, draws, shape)


def _path(mode: CounterDropout, x: Tensor, p: float, training: bool = True) -> Tensor:
    if not training or p == 0 or not x.numel():
        return x
    draws = mode.draws(x, tuple(x.shape[:1]), p)
    if draws is None:
        return x
    of_sequences = DropoutDraws(draws.p, draws.sequence_keys, draws.call, ())
    num_each = x.shape[0] // len(draws.sequence_keys)

    def factors(dtype: torch.dtype) -> Tensor:
        found = of_sequences.factors(dtype).repeat_interleave(num_each)
        return found.view(-1, *[1] * (x.dim() - 1))

    return times_factors(x, factors)


def _uniform_like(mode: CounterDropout, x: Tensor) -> Tensor:
    """1 / e where nothing is drawn."""
    draws = mode.draws(x, tuple(x.shape), 0.0)
    if draws is None or has_no_memory(x):
        return torch.full_like(x, math.exp(-1))
    return draws.uniform(x.dtype).add_(1).div_(2).view(x.shape)


def _embedding_noise(mode: CounterDropout, x: Tensor, alpha: float) -> Tensor:
    draws = mode.draws(x, tuple(x.shape), 0.0)
    return x if draws is None else add_noise(x, draws, alpha, mode.documents_BT)


def _alpha_dropout(
    mode: CounterDropout,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0:
        return input
    what = "alpha dropout draws random numbers, which would differ between layouts"
    raise PlanError(Fault(mode.block, what, fix="nn.Dropout in its place"))


def _scaled_dot_product_attention(
    mode: CounterDropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    draws = None
    if dropout_p > 0:
        draws = mode.draws(query, (*query.shape[:-1], key.shape[-2]), dropout_p)
    if draws is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:
        group_size = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(group_size, -3)
        value = value.repeat_interleave(group_size, -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None and _is_of_whole_sequences(query, key, draws):
        heads = AttentionDraws(draws.dims[0], draws)
        mask = AttentionMask(causal=is_causal, documents=False)
        spec = AttentionSpec(mask, factor, dropout=dropout_p, draws=heads)
        return _dropped_attention(query, key, value, spec)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(wide) * factor
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
    shape = weights.shape

    def factors(dtype: torch.dtype) -> Tensor:
        return draws.factors(dtype).view(shape)

    out: Tensor = times_factors(weights, factors).to(value.dtype) @ value
    return out


def _dropped_attention(
    q_BHSK: Tensor, k_BHSK: Tensor, v_BHSW: Tensor, spec: AttentionSpec
) -> Tensor:
    """Attention of whole sequences, some queries at a time."""
    q, k, v = (x.transpose(1, 2) for x in (q_BHSK, k_BHSK, v_BHSW))
    call = attention_call(q, k, v, spec, has_documents=False)
    blocks = row_blocks(call, attention_device(q_BHSK), None)
    return SequenceAttention(spec, blocks)(q, k, v).transpose(1, 2)


def _is_of_whole_sequences(query: Tensor, key: Tensor, draws: DropoutDraws) -> bool:
    """Whether q and k are of as many columns, [B, H, S, K], of which a rank may hold some heads."""
    if query.dim() != 4 or query.shape[2] != key.shape[2] or len(draws.dims) != 3:
        return False
    whole = DimEntries.whole(query.shape[2])
    return draws.dims[1:] == (whole, whole)


def _multi_head_attention(mode: CounterDropout, *args: Any, **kwargs: Any) -> Any:
    """torch's own code, with this mode inside, which torch leaves where it calls one function."""
    with mode:
        return _UNCHECKED_MULTI_HEAD_ATTENTION(*args, **kwargs)


def _without_override(function: FunctionType) -> FunctionType:
    """A function of torch that does not look for modes at its beginning."""
    # a copy of the function alone: torch's own one looks for modes as before
    own_globals = {**function.__globals__, "has_torch_function": lambda _tensors: False}
    copied = FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_UNCHECKED_MULTI_HEAD_ATTENTION = _without_override(F.multi_head_attention_forward)  # type: ignore[arg-type]

REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.dropout_: _torch_dropout_,
    F.dropout1d: _channels,
    F.dropout2d: _channels,
    F.dropout3d: _channels,
    torch.feature_dropout: _channels,
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _alpha_dropout,
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    F.multi_head_attention_forward: _multi_head_attention,
    attention_draws: CounterDropout.draws_of_attention,
    drop_path: _path,
    uniform_like: _uniform_like,
    embedding_noise: _embedding_noise,
}
"""Functions that drop out -> what is called in their place, with the mode first."""
