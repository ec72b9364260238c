"""weft's attention and masks behind transformers' interfaces: what its layers call instead of its own kernels.

A layer calls the attention function of the implementation `weft`, which hands q, k and v to the
`Attend` that the attention module holds. Which keys that one sees is known from the mask function
that the trunk has asked the mask interface for; nothing of size S x S is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.attention_mask import AttentionMask
from weft.errors import Fault, PlanError
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.models.transformers.experts import mixture

NAME = "weft"
EAGER = "eager"
"""Implementation of models whose layers do not call the attention interface."""
ATTEND = "weft_attend"
"""Child of an attention module that computes its attention; see `attend_name`."""
KNOWN_TENSORS = frozenset({"s_aux", "position_ids", "cache_position", "cu_seq_lens_q"})
"""Tensors that an attention function may be given beside q, k and v without computing with them."""


@dataclass(frozen=True)
class NamedMask:
    """What the mask interface returns: a value instead of a tensor; None: `Attend` has none for it,
    which only a model that uses it is rejected for.
    """

    mask: AttentionMask | None


@dataclass
class Recording:
    """What attention is asked for in one run of a model: attention module -> an `Attend` a call."""

    attends: dict[nn.Module, list[Attend]] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockCall:
    """The call of a block: its input, the batch, and zeros in place of embeddings; while a model is
    recorded there are none. `num_calls` counts those of attention, by the identity of its module;
    `tensors` are those that layers are handed beside the hidden state, by number (carried.py).
    """

    x: Any = None
    batch: Batch | None = None
    embeds: Any = None
    recording: Recording | None = None
    num_calls: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)


class BlockDone(Exception):  # noqa: N818 - no error: the end of a block's part of a forward
    """The output of a block, raised where its part of the model's forward ends."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


def end_at_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook that ends the forward with what the module reads."""
    raise BlockDone(args[0])


_call: ContextVar[BlockCall] = ContextVar("call of a block")


def current_call() -> BlockCall:
    """The call of the block that runs in this thread."""
    return _call.get()


@contextmanager
def calling(call: BlockCall) -> Iterator[None]:
    """Modules that run inside belong to this call."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query_BHSK, key_BGSK, value_BGSW -> out_BSHW, no weights."""
    call = current_call()
    if key.shape[2] != query.shape[2]:  # compressed keys behind those of tokens
        name = type(module).__name__
        raise _unsupported(f"{name} attends to {key.shape[2]} keys of {query.shape[2]} tokens")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if call.recording is not None:
        attends = call.recording.attends.setdefault(module, [])
        attends.append(_attend_of(module, attention_mask, options))
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), None
    number = call.num_calls.get(id(module), 0)
    call.num_calls[id(module)] = number + 1
    attend = getattr(module, attend_name(number))
    return attend(q, k, v, call.batch).contiguous(), None  # some layers take a view of it


def attend_name(number: int) -> str:
    """The child of an attention module that computes a call of its forward: each has a cache."""
    return f"{ATTEND}{number or ''}"


def _attend_of(module: nn.Module, mask: Any, options: dict[str, Any]) -> Attend:
    """The `Attend` that computes what a module asks for.

    Raises:
        PlanError: a bias or a mask that `Attend` has no value for.
    """
    name = type(module).__name__
    for key, value in options.items():
        if isinstance(value, Tensor) and key not in KNOWN_TENSORS:
            raise _unsupported(f"{name} adds {key} to the scores of attention")
    if isinstance(mask, Tensor):
        raise _unsupported(f"{name} masks attention by a tensor of its own")
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    found = mask.mask if isinstance(mask, NamedMask) else AttentionMask(causal=bool(is_causal))
    if found is None:
        raise _unsupported("its mask is neither causal nor a sliding window")
    return Attend(
        mask=found,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        dropout=options.get("dropout") or 0.0,
    )


def _unsupported(what: str) -> PlanError:
    return PlanError(Fault("model.name", what, fix="another architecture (docs/architectures.md)"))


def mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_others: Any
) -> NamedMask:
    """What the mask interface is asked for, as a value; blocks have it from a recording."""
    if current_call().recording is None:
        return NamedMask(AttentionMask())
    candidates = [AttentionMask(), AttentionMask(causal=False)]
    if local_size:  # 0 in configs that use no window
        candidates.append(AttentionMask(window=local_size))
    edges = _edges(local_size or 1)
    wanted = _evaluated(mask_function, edges)
    for candidate in candidates:
        if wanted == [[candidate.allows(query, key) for key in edges] for query in edges]:
            return NamedMask(candidate)
    return NamedMask(None)


def _edges(window: int) -> list[int]:
    """Columns between which masks of this window, or of chunks of this length, differ."""
    near = {start + step for start in (0, window, 2 * window, 3 * window) for step in range(-2, 3)}
    return sorted(column for column in near if column >= 0)


def _evaluated(mask_function: Callable[..., Any], columns: list[int]) -> list[list[bool]]:
    with _disable_current_modes():
        at = torch.tensor(columns, device="cpu")
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        seen = mask_function(zero, zero, at[:, None], at[None, :])
        found: list[list[bool]] = seen.expand(len(columns), len(columns)).tolist()
    return found


def register() -> None:
    """Make `weft` an implementation of attention, masks and experts in transformers, and let its masks
    ask no values of the meta device, which has none.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.moe import ExpertsInterface
    from transformers.utils import import_utils

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    ExpertsInterface.register(NAME, mixture)
    is_tracing = getattr(masking_utils, "is_tracing", None)
    if is_tracing is not None and not isinstance(is_tracing, _HasNoValues):
        setattr(masking_utils, "is_tracing", _HasNoValues(is_tracing))  # noqa: B010 - not a function
    captures = getattr(import_utils, CAPTURES, None)
    if captures is not None and not isinstance(captures, _IfCudaRuns):
        setattr(import_utils, CAPTURES, _IfCudaRuns(captures))


@dataclass(frozen=True)
class _HasNoValues:
    """Whether a program is traced, and so has no values: also on the meta device."""

    is_tracing: Callable[..., bool]

    def __call__(self, tensor: Tensor | None = None) -> bool:
        return (tensor is not None and tensor.is_meta) or self.is_tracing(tensor)


CAPTURES = "is_cuda_stream_capturing"


@dataclass(frozen=True)
class _IfCudaRuns:
    """Whether a CUDA stream is captured: not where CUDA has not started, which the question would do, and
    ranks could not be forked then.
    """

    captures: Callable[[], bool]

    def __call__(self) -> bool:
        return torch.cuda.is_initialized() and self.captures()
